"""Energy and money of GPU-hours: two more columns, each only where its figure is known or given."""

from dataclasses import dataclass

from trilane.utils.validation import require_not_negative

# Watts of a whole node at most, over its GPUs, from the data sheets: DGX-1 V100 3.5 kW / 8, DGX A100 6.5 kW / 8, DGX
# H100 and H200 10.2 kW / 8. A node that computes draws less than its most, so these are upper ends.
NODE_WATTS_PER_GPU = {"V100": 3500 / 8, "A100": 6500 / 8, "H100": 10200 / 8, "H200": 10200 / 8}


# What the building adds for cooling and supply. Assumed; large centres report 1.1 to 1.6.
OVERHEAD = 1.2


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a GPU-hour costs in money (any currency) and draws in power; None where nobody said."""

    per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("price", self.per_gpu_hour), ("watts", self.watts_per_gpu)):
            if value is not None:
                require_not_negative(name, value)

    def cost(self, gpu_hours: float) -> float | None:
        """Money of so many GPU-hours."""
        return None if self.per_gpu_hour is None else self.per_gpu_hour * gpu_hours


def energy_kwh(gpu_hours: float, gpu: str, price: Price) -> float | None:
    """Kilowatt-hours with the building's share; None for a card that is not in the table and no watts given."""
    card = gpu.partition("-")[0]
    watts = NODE_WATTS_PER_GPU.get(card) if price.watts_per_gpu is None else price.watts_per_gpu
    return None if watts is None else gpu_hours * watts * OVERHEAD / 1000


def energy_unit(kwh: float | None) -> tuple[str, float]:
    """The unit that an amount of energy is told in, and how many kWh it has: ("MWh", 1000.0), or kWh below one MWh."""
    return ("MWh", 1e3) if kwh is None or kwh >= 1e3 else ("kWh", 1.0)


def energy_words(kwh: float) -> str:
    """ "997 MWh", or "4.58 kWh"."""
    unit, each = energy_unit(kwh)
    return f"{kwh / each:,.3g} {unit}" if kwh < 1e3 else f"{kwh / each:,.0f} {unit}"
