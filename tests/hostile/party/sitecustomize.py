"""Change the behaviour of a party of a real federation. Python imports this module when the party's processes start.

``FEDSTRATA_PARTY`` is ``hostile`` for a server that attacks instead of running its job, ``probing`` for a server that
asks sites whether other descriptions fit their data, and ``open`` for a site without a guard, to which each attack is
compared.
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
