"""A method: four choices under a name. Try it:

fedstrata run --set method={module}:Steady
fedstrata compare --methods fedavg,{module}:Steady
"""

import fedstrata as fs


class Steady(fs.Recipe):
    """Clients drawn by size, each pulled back to the global model.

    Name the choices in which the method differs from FedAvg: client_sampler, data_sampler, objective, aggregator.
    """

    client_sampler = fs.Weighted()
    objective = fs.Proximal(mu=0.1)
    mu: float = fs.setting_of("objective")  # the objective's setting, now the method's: --set method.mu=0.5
