"""The queue over HTTP: the methods and values of `Queue`, for programs on other machines.

Each method is written once, as an exchange: a generator that says what to ask, gets the answer, and
knows neither sockets nor event loops. `Client` and `AsyncClient` do what it says (decision 0032).

    calling, awaiting, connecting   the two clients; what both need of httpx
    documents, operating            the exchanges: of everybody, of operators
    asking, refusing                asking again when it may help; refusals as errors
    uploading, downloading          what is sent piece by piece; what is checked before it is given
    values                          the service's JSON as the values of the queue
"""

from fairturn.client.exchange import Tries
from fairturn.client.upload import Progress
from fairturn.client.values import Me, Standing

__all__ = ["Tries", "Progress", "Me", "Standing"]
