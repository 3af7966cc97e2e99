// Send rates of kernels that store into peers' memory.
#pragma once

namespace tandem::gpu {

/// Aggregate NVLink store throughput of all SMs of an H200, in GB/s. GEMM+RS's paces are
/// percentages of it.
constexpr double kLinkGBs = 345;
/// Send rates of AG+GEMM's copy warps, in bytes per nanosecond: just below the link's, since on a
/// saturated link the loads of their blocks would wait for the stores; and a lower one that
/// disturbs the GEMM less, better if the link has slack.
constexpr int kLinkPace = 330, kSlowLinkPace = 250;

}  // namespace tandem::gpu
