"""A search for quicker plans: genes (candidates as data), lists (where to begin), search."""

from torchweft.plan.improve.genes import Genes, from_genes, genes_of
from torchweft.plan.improve.search import improve, searched

__all__ = ["Genes", "from_genes", "genes_of", "improve", "searched"]
