"""Quotas: limits on requests, tokens and concurrency, over a hierarchy of subjects.

model -> policy -> plan          what holds for a request
admission -> store -> ledger     whether it may pass, and what it used in the end
"""
