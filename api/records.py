"""What the store keeps besides documents: the answer to one planning request."""

from ..core.service.documents import GraphList as GraphList
from ..core.service.documents import GraphSummary as GraphSummary
from ..core.service.documents import PlanList as PlanList
from ..core.service.documents import PlanSummary as PlanSummary
from ..core.service.documents import ProfileList as ProfileList
from ..core.service.documents import ProfileSummary as ProfileSummary
from ..core.service.documents import StoredGraph as StoredGraph
from ..core.service.documents import StoredProfile as StoredProfile
from ..core.service.plans import InfeasibleAnswer as InfeasibleAnswer
from ..core.service.plans import PlanRecord as PlanRecord
from ..core.service.plans import StoredPlan as StoredPlan
from ..core.service.plans import WayOutAnswer as WayOutAnswer
from ..core.service.plans import infeasible_answer as infeasible_answer
