"""The choice of plans: bound, predict, and a search: genes (candidates), lists (to begin), search,
replay."""

from torchweft.plan.improve.genes import Genes, from_genes, genes_of
from torchweft.plan.improve.predict import auto
from torchweft.plan.improve.replay import replay
from torchweft.plan.improve.search import improve, searched

__all__ = ["Genes", "auto", "from_genes", "genes_of", "improve", "replay", "searched"]
