// Paces for kernels that store into peers' memory.
#pragma once

namespace tandem::gpu {

/// What the stores of all SMs of an H200 move over NVLink together, in GB/s. GEMM+RS's
/// paces are parts of it.
constexpr double kWireGBs = 345;
/// Paces of AG+GEMM's couriers, in bytes per nanosecond: just below the wire's, since once that is
/// full, the loads of the blocks they are in wait behind the stores; and one at which they disturb
/// the product less, which is the better one where the wire has time to spare.
constexpr int kWirePace = 330, kSlowWirePace = 250;

}  // namespace tandem::gpu
