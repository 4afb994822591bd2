"""Makes a party of a real federation another one than it should be: read by Python when its processes start.

``FEDSTRATA_PARTY`` says how: ``hostile``, a server that attacks instead of running its job; ``probing``, one that asks
sites whether other descriptions fit their data; ``open``, a site without a guard, the control of each attack.
"""

import os

PARTY = os.environ.get("FEDSTRATA_PARTY")
if PARTY == "hostile":
    import attacks

    from fedstrata.sites import job

    job.run_prepared = attacks.instead_of_the_job
elif PARTY == "probing":
    import attacks

    from fedstrata.sites import job

    job.surveyed, job.run_prepared = attacks.instead_of_the_survey, attacks.nothing
elif PARTY == "open":
    from site_process import Absent

    from fedstrata.sites import site_server

    site_server.Guard = Absent
