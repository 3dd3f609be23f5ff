"""Compares the renderings of public chat templates with transformers'. See scripts/templates.sh."""

import argparse
import collections
import datetime
import json
import pathlib
import subprocess
import sys

import transformers.utils.chat_template_utils as reference
from chats import chats

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
NOW = datetime.datetime(2026, 1, 15, 12, 30, 0)


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def expected(template, chat):
    """What `apply_chat_template` would return, or nothing where it raises."""
    chat = dict(chat)
    try:
        if chat.get("continue_final_message") and chat.get("add_generation_prompt"):
            raise ValueError("both")
        messages = reference._normalize_chat_messages(chat.pop("messages"))
        tokens = {name: token for name, token in SPECIAL_TOKENS.items() if name not in chat}
        texts, _ = reference.render_jinja_template(
            conversations=[messages], chat_template=template, **tokens, **chat
        )
        return texts[0]
    except Exception as error:  # Whatever a template makes Python raise, an engine answers with an error.
        return {"error": f"{type(error).__name__}: {error}"}


def verdict(theirs, ours):
    raises = isinstance(theirs, dict), isinstance(ours, dict)
    return {
        (False, False): "equal" if theirs == ours else "differs",
        (False, True): "only here an error",
        (True, False): "only there an error",
        (True, True): "both errors",
    }[raises]


def show(name, chat, theirs, ours):
    print(f"--- {name}: {chat}")
    if isinstance(theirs, str) and isinstance(ours, str):
        at = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
        theirs, ours = (f"...{side[max(0, at - 60) : at + 80]!r}" for side in (theirs, ours))
    print(f"    theirs {str(theirs)[:300]}\n    ours   {str(ours)[:300]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("renderer")
    parser.add_argument("templates", type=pathlib.Path)
    parser.add_argument("--only", default="", help="templates whose names contain this")
    parser.add_argument("--show", type=int, default=2, help="differences to print for each template")
    arguments = parser.parse_args()
    reference.datetime = Clock
    cases = chats()
    names = [path.stem for path in sorted(arguments.templates.glob("*.jinja")) if arguments.only in path.stem]
    counts, odd = collections.Counter(), []
    with subprocess.Popen([arguments.renderer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for name in names:
            template = (arguments.templates / f"{name}.jinja").read_text(encoding="utf-8")
            now = int(NOW.replace(tzinfo=datetime.timezone.utc).timestamp())
            task = {"template": template, "special_tokens": SPECIAL_TOKENS, "now": now, "chats": list(cases.values())}
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            results = json.loads(process.stdout.readline())
            shown = 0
            found = collections.Counter()
            for (chat_name, chat), ours in zip(cases.items(), results, strict=True):
                theirs = expected(template, chat)
                outcome = verdict(theirs, ours)
                found[outcome] += 1
                if outcome not in ("equal", "both errors") and shown < arguments.show:
                    shown += 1
                    show(name, chat_name, theirs, ours)
            counts += found
            if found["differs"] or found["only here an error"] or found["only there an error"]:
                odd.append(name)
    print(f"{len(names)} templates, {len(cases)} chats each: {len(names) - len(odd)} equal in all; {dict(counts)}")
    sys.exit(bool(odd))


if __name__ == "__main__":
    main()
