"""The five mesh axes and the words for groups of them.

| tensor                         | pp        | dp     | ep         | sp          | tp                   |
|--------------------------------|-----------|--------|------------|-------------|----------------------|
| tokens, residual stream        | varies    | rows   | rows       | positions   | positions            |
| dense weights of the trunk     | layer dim | =      | =          | =           | by the weight's spec |
| norms, router, router bias     | layer dim | =      | =          | =           | =                    |
| routed experts                 | layer dim | =      | expert dim | =           | expert or hidden dim |
| embedding, head, leading dense | =         | =      | =          | =           | by the weight's spec |

Gradients are summed over all axes that a weight's spec leaves out, once per step, after the micro-batches.
"=" means equal on every rank of the axis. With `parallel.zero` 1 or 3 the state also splits weights and
optimiser state over the data axes (`step/layout.py`).
"""

PP, DP, EP, SP, TP = "pp", "dp", "ep", "sp", "tp"

#: Slowest to fastest; tp innermost, where the links are fastest.
AXES = (PP, DP, EP, SP, TP)

#: Rows of a batch are split over these.
ROW_AXES = (DP, EP)

#: Positions of a row are split over these, sp major.
POSITION_AXES = (SP, TP)

#: Distinct tokens of one data-parallel replica: positions only.
REPLICA_AXES = POSITION_AXES
