"""Writes an OCI image with some files and nothing else, as `FROM scratch` and `COPY` do, always the same bytes.

    oci.py ARCHIVE NAME:TAG FILE=PATH...
"""

import gzip
import hashlib
import io
import json
import sys
import tarfile

EPOCH = "1970-01-01T00:00:00Z"


def tar(files):
    """A tar of {path: bytes}, of nobody's and of no time."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


def place(content):
    return "blobs/" + digest(content).replace(":", "/")


def described(kind, content, **more):
    return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": digest(content), "size": len(content), **more}


def dump(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def image(name, files):
    """The files of an image's layout."""
    layer = tar(files)
    packed = gzip.compress(layer, mtime=0)
    config = dump({
        # The one there is: what is in it runs in no operating system.
        "architecture": "amd64", "os": "linux", "created": EPOCH, "config": {},
        "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        "history": [{"created": EPOCH, "created_by": "COPY " + " ".join(sorted(files)) + " /"}],
    })
    manifest = dump({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described("config.v1+json", config), "layers": [described("layer.v1.tar+gzip", packed)],
    })
    names = {"org.opencontainers.image.ref.name": name.rsplit(":", 1)[1], "io.containerd.image.name": name}
    index = dump({"schemaVersion": 2, "manifests": [described("manifest.v1+json", manifest, annotations=names)]})
    # For `docker load` before Docker 25.
    docker = [{"Config": place(config), "RepoTags": [name], "Layers": [place(packed)]}]
    return {
        "oci-layout": dump({"imageLayoutVersion": "1.0.0"}), "index.json": index, "manifest.json": dump(docker),
        **{place(blob): blob for blob in (packed, config, manifest)},
    }


def main(archive, name, *pairs):
    files = {}
    for pair in pairs:
        file, path = pair.split("=")
        with open(file, "rb") as source:
            files[path] = source.read()
    with open(archive, "wb") as out:
        out.write(tar(image(name, files)))


if len(sys.argv) < 4:
    sys.exit(__doc__)
main(*sys.argv[1:])
