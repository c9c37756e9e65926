"""The way in: a model, traced by Dynamo, becomes a `Graph` with a body for each op.

Dynamo's graph --rows--> kinds --units, regions--> ops --assembly--> Capture
"""

from torchweft.capture.bodies.bodies import Body
from torchweft.capture.dynamo import Capture, capture
from torchweft.capture.probe import probe

__all__ = ["Body", "Capture", "capture", "probe"]
