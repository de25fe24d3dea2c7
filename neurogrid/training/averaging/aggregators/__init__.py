"""Many vectors to one: what the members of a round put in, in the order of the members, becomes what all of them apply.

All but three work on any part of the vectors by itself. Krum, multi-Krum and the geometric median need to know how far
the whole vectors are from one another: each part gives its share of the squared distances, their sum gives the weights
of the members, and with those every part is a weighted mean. It knows neither rounds nor peers.

    aggregator     what every one can do, and what it refuses
    mean           weighted, added row by row as they come; also of signs
    order          trimmed mean and median of each element
    distances      Krum, multi-Krum, geometric median
    names          an aggregator by its name
"""

from neurogrid.training.averaging.aggregators.aggregator import Aggregator
from neurogrid.training.averaging.aggregators.distances import DistanceAggregator
from neurogrid.training.averaging.aggregators.mean import Accumulator, Mean, RowSum
from neurogrid.training.averaging.aggregators.names import parse_aggregator

__all__ = ["Accumulator", "Aggregator", "DistanceAggregator", "Mean", "RowSum", "parse_aggregator"]
