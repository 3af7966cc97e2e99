// Paces for kernels that store into peers' memory.
#pragma once

namespace tandem::gpu {

/// What the stores of all multiprocessors of an H200 move over NVLink together, in GB/s. GEMM+RS's
/// paces are parts of it.
constexpr double kWireGBs = 345;
/// The pace of AG+GEMM's couriers, in bytes per nanosecond, just below it: once the wire is full,
/// the loads of the blocks they are in wait behind the stores.
constexpr int kWirePace = 330;

}  // namespace tandem::gpu
