"""Stop a site's job process in round 3, after its masked vector and before its shares. Python imports this module.

``FEDSTRATA_HALTED`` is the path of a file that is then created, and its name without suffix is the name of the site.
"""

import os
import sys
import time
from pathlib import Path

HALTED = Path(os.environ.get("FEDSTRATA_HALTED", ""))
WORDS = " ".join(sys.orig_argv)
if HALTED.stem and "worker_process" in WORDS and f"/{HALTED.stem}" in WORDS:
    from fedstrata.federation.secure.protocol import RevealAll
    from fedstrata.sites.site_server import SiteRun

    answer = SiteRun.ask

    def ask(self, question):
        """Answer a message, except the request for the shares of round 3."""
        if isinstance(getattr(question.requests[0], "message", None), RevealAll) and self.guard.round == 3:
            HALTED.touch()
            time.sleep(3600)
        return answer(self, question)

    SiteRun.ask = ask
