"""What an engine holds, read off its cache events in the plainest way: every block is known by all that is in front of it.

For checking others. It hashes nothing, so it shares no mistake with the agent or the filter; it needs every event from
the engine's start, or from when it was last cleared, and grows without bound. msgspec comes with the engine.
"""

import collections

import msgspec


class Held:
    """An engine's blocks, as of the events so far."""

    def __init__(self, block_tokens):
        self.block_tokens = block_tokens
        self.keys = {}
        self.clear()

    def clear(self):
        self.by_hash = {}
        # Copies of one block are stored and removed one by one.
        self.copies = collections.Counter()

    def apply(self, event):
        match event["type"]:
            case "AllBlocksCleared":
                self.clear()
            case "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    self.remove(block_hash)
            case "BlockStored":
                self.store(event)

    def remove(self, block_hash):
        if (key := self.by_hash.get(block_hash)) is None:
            return
        self.copies[key] -= 1
        if not self.copies[key]:
            del self.copies[key], self.by_hash[block_hash]

    def store(self, event):
        hashes, tokens, parent = event["block_hashes"], event["token_ids"], event["parent_block_hash"]
        if parent is None:
            key = self.root(event["lora_name"], first_salt(event))
        elif (key := self.by_hash.get(parent)) is None:
            return
        for number, block_hash in enumerate(hashes):
            key = self.key(key, tokens[number * self.block_tokens : (number + 1) * self.block_tokens])
            self.by_hash[block_hash] = key
            self.copies[key] += 1

    def root(self, adapter, salt):
        return self.key(None, (adapter, salt))

    def key(self, parent, tokens):
        return self.keys.setdefault((parent, tuple(tokens)), len(self.keys))

    def cached_tokens(self, prompt, adapter=None, salt=None):
        """What the engine would say now. At least the last token is always computed."""
        key, tokens = self.root(adapter, salt), self.block_tokens
        for number in range((len(prompt) - 1) // tokens):
            key = self.keys.get((key, tuple(prompt[number * tokens : (number + 1) * tokens])))
            if key is None or not self.copies[key]:
                return number * tokens
        return (len(prompt) - 1) // tokens * tokens


def first_salt(event):
    """Of the first block's extra keys, what is not the adapter's name."""
    keys = (event.get("extra_keys") or [None])[0] or []
    return next((key for key in keys if key != event["lora_name"]), None)


def decoded(payload):
    """A batch's events."""
    return msgspec.msgpack.decode(payload)[1]
