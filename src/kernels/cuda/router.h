// Router kernels on a stream of a GPU; semantics in kernels/router.h. Throw InvalidArgument for
// more experts than kMaxExperts.
#pragma once

#include "kernels/router.h"
#include "tandem/tensor.h"

struct CUstream_st;  // CUDA's: cudaStream_t points to it

namespace tandem::gpu {

/// Max experts of a router, and of a rank in an MoE layer.
constexpr int kMaxExperts = 1024;

void route_forward(CUstream_st* stream, const Tensor& logits, const Tensor& bias,
                   const RouterOptions& options, const Tensor& scores, const Tensor& experts,
                   const Tensor& weights, const Tensor& tokens);
void route_backward(CUstream_st* stream, const Tensor& scores, const Tensor& experts,
                    const Tensor& dweights, const Tensor& balance, const RouterOptions& options,
                    const Tensor& dlogits);
void add_router_load(CUstream_st* stream, const Tensor& scores, const Tensor& chosen,
                     const Tensor& load);
void add_loads(CUstream_st* stream, const Tensor& from, const Tensor& to);
void balance_gradient(CUstream_st* stream, const AuxLoss& loss, const Tensor& load,
                      const Tensor& balance);
void add_aux_losses(CUstream_st* stream, const AuxLoss& loss, const Tensor& loads,
                    const Tensor& total);
void adjust_router_bias(CUstream_st* stream, const Tensor& load, float rate, const Tensor& bias);

}  // namespace tandem::gpu
