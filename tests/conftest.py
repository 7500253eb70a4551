"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# A machine that is slow for a moment is no fault of what is tested.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
