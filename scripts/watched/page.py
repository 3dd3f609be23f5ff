"""Opens a page in a headless Chromium, waits, and writes what it shows: its texts by id as JSON, and a picture.

    page.py BROWSER URL SECONDS PICTURE.png

Chromium is driven over a pipe, by what its DevTools call a protocol: nothing but Python's own library is needed, and no
port is opened. It exits with 1 where the page logged an error or asked any other origin for anything.
"""

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from urllib.parse import urlsplit

# Beyond this a browser has hung.
PATIENCE_S = 60

FIGURES = """(() => {
  const texts = Object.fromEntries([...document.querySelectorAll("[id]")].map(e => [e.id, e.textContent.trim()]));
  const replicas = [...document.querySelectorAll(".replica")].map(e => Object.fromEntries(
    [".name", ".text", ".blocks", ".load"].map(part => [part.slice(1), e.querySelector(part).textContent])));
  const bars = [...document.querySelectorAll(".replica .cache i")].map(e => e.style.width);
  return JSON.stringify({texts, replicas, bars, shown: document.body.dataset.shown});
})()"""


class Browser:
    """One Chromium with one page."""

    def __init__(self, browser, profile):
        ours, theirs = os.pipe(), os.pipe()
        # It reads orders from descriptor 3 and answers on 4.
        def descriptors():
            os.dup2(ours[0], 13)
            os.dup2(theirs[1], 14)
            os.dup2(13, 3)
            os.dup2(14, 4)

        arguments = [browser, "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
                     "--hide-scrollbars", "--window-size=1200,1000", f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(arguments, preexec_fn=descriptors, close_fds=False,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(ours[0])
        os.close(theirs[1])
        self.orders, self.answers = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self.number, self.events = 0, []

    def read(self):
        message = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            if not byte:
                sys.exit("the browser ended")
            message += byte
        return json.loads(message)

    def ask(self, method, session=None, **parameters):
        self.number += 1
        order = {"id": self.number, "method": method, "params": parameters}
        if session:
            order["sessionId"] = session
        self.orders.write(json.dumps(order).encode() + b"\0")
        self.orders.flush()
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    sys.exit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)


def main():
    # Who is asked to end ends what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    browser, url, seconds, picture = sys.argv[1:]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        chromium = Browser(browser, profile)
        try:
            target = chromium.ask("Target.createTarget", url="about:blank")["targetId"]
            session = chromium.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                chromium.ask(f"{domain}.enable", session)
            chromium.ask("Page.navigate", session, url=url)
            time.sleep(min(float(seconds), PATIENCE_S))
            found = chromium.ask("Runtime.evaluate", session, expression=FIGURES)["result"]["value"]
            shot = chromium.ask("Page.captureScreenshot", session, format="png")
            with open(picture, "wb") as file:
                file.write(base64.b64decode(shot["data"]))
        finally:
            chromium.process.kill()
            chromium.process.wait()
    print(found)
    problems = []
    for event in chromium.events:
        parameters = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            asked = urlsplit(parameters["request"]["url"])
            if asked.netloc != urlsplit(url).netloc:
                problems.append(f"asked for {parameters['request']['url']}")
        elif event.get("method") == "Runtime.exceptionThrown":
            problems.append(parameters["exceptionDetails"].get("exception", {}).get("description", "an exception"))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            # Browsers ask for an icon, which there is none of.
            if not parameters["entry"].get("url", "").endswith("/favicon.ico"):
                problems.append(parameters["entry"]["text"])
    if problems:
        sys.exit("\n".join(problems))


main()
