"""Read a ``.pt2`` file of ``torch.export.save`` as data: no torch, no pickle, nothing executed.

Other tracers and the documents capture writes are not known here.
"""
