"""Files of other formats: STG, DNN-partitioning and bracketed trees become problems."""
