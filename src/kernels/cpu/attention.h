// Attention on the calling thread's CPU threads; semantics in kernels/attention/attention.h.
#pragma once

#include <memory>

#include "kernels/attention/attention.h"

namespace tandem::cpu {

class Attention {
 public:
  Attention(const AttentionShape& shape, const RopeTable& rope);
  ~Attention();
  void forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
               const Tensor& log_sums, const AttentionMask& mask);
  void backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                const Tensor& log_sums, const Tensor& dout, const Tensor& dq, const Tensor& dk,
                const Tensor& dv, const AttentionMask& mask);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::cpu
