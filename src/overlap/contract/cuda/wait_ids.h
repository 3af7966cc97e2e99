// Numbers of the overlap operators in device-side errors, and their names.
#pragma once

#include "comm/device/device_signal.h"

namespace tandem::gpu {

constexpr OpId kAgGemmWait{4}, kGemmRsWait{5}, kGemmArWait{6}, kAgWgradWait{7};

inline const WaitNames kOverlapWaits{{kAgGemmWait, "ag_gemm"},
                                     {kGemmRsWait, "gemm_rs"},
                                     {kGemmArWait, "gemm_ar"},
                                     {kAgWgradWait, "ag_wgrad"}};

}  // namespace tandem::gpu
