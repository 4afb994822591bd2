"""A method, which combines four choices under a name. Try it:

fedstrata run --set method={module}:Steady
fedstrata compare --methods fedavg,{module}:Steady
"""

from pydantic import Field

import fedstrata as fs


class Steady(fs.Recipe):
    """Clients with more samples are invited more often, and training stays close to the global model.

    The four choices of a method are client_sampler, data_sampler, objective and aggregator.
    """

    mu: float = Field(0.1, ge=0)  # a setting of the method; set it with --set method.mu=0.5

    def parts(self):
        """Return the choices that differ from FedAvg's choices."""
        return {"client_sampler": fs.Weighted(), "objective": fs.Proximal(mu=self.mu)}
