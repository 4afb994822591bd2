"""fedstrata: federated learning that is robust to non-IID data and client dropouts.

>>> import fedstrata as fs
>>> spec = fs.Experiment(method=fs.SCAFFOLD(), partition=fs.Dirichlet(alpha=0.1, clients=20),
...                      training=fs.Training(rounds=2))
>>> len(fs.run(spec))
2
"""

from __future__ import annotations

import lazy_loader

__version__ = "0.1.0"

# Each name is imported at its first use, because importing PyTorch takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
