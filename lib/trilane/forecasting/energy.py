"""Energy and money of GPU-hours, each where its rate is known or given."""

from dataclasses import dataclass

from trilane.utils.validation import require_not_negative

# Maximum watts of a node per GPU, from the data sheets: DGX-1 V100 3.5 kW / 8, DGX A100 6.5 kW / 8, DGX H100 and H200
# 10.2 kW / 8. A node in training draws less than its maximum, so these are upper bounds.
NODE_WATTS_PER_GPU = {"V100": 3500 / 8, "A100": 6500 / 8, "H100": 10200 / 8, "H200": 10200 / 8}
# Power usage effectiveness: cooling and supply of the building. Assumed; large centres report 1.1 to 1.6.
PUE = 1.2


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a GPU-hour costs in money (any currency) and a GPU draws in power; None where not given."""

    per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("price", self.per_gpu_hour), ("watts", self.watts_per_gpu)):
            if value is not None:
                require_not_negative(name, value)

    def cost(self, gpu_hours: float) -> float | None:
        """Money for so many GPU-hours; None without a price."""
        return None if self.per_gpu_hour is None else self.per_gpu_hour * gpu_hours


def energy_kwh(gpu_hours: float, gpu: str, price: Price) -> float | None:
    """Kilowatt-hours, the building's overhead included; None where the GPU's power is neither known nor given."""
    card = gpu.partition("-")[0]
    watts = NODE_WATTS_PER_GPU.get(card) if price.watts_per_gpu is None else price.watts_per_gpu
    return None if watts is None else gpu_hours * watts * PUE / 1000


def energy_unit(kwh: float | None) -> tuple[str, float]:
    """The unit for an amount of energy, and its size in kWh: ("MWh", 1000.0), or ("kWh", 1.0) below one MWh."""
    return ("MWh", 1e3) if kwh is None or kwh >= 1e3 else ("kWh", 1.0)


def energy_text(kwh: float) -> str:
    """ "997 MWh", or "4.58 kWh"."""
    unit, each = energy_unit(kwh)
    return f"{kwh / each:,.3g} {unit}" if kwh < 1e3 else f"{kwh / each:,.0f} {unit}"
