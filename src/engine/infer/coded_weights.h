// Matrices of a rank's model in 8 bits (gemm/coded_weight.h): those of the branches' GEMMs, the
// experts and the head.
#pragma once

#include <map>

#include "engine/model/weight_writer.h"
#include "gemm/coded_weight.h"

namespace tandem {

/// Throws Unsupported naming the size whose division over `tp` ranks has no weights of the format,
/// as groups of inputs would cross ranks.
void check_coded_weights(const ModelConfig& config, int tp, WeightFormat format);

/// Sets the matrices in `values`, f32 [layout.size] on exec's device, to what they are in the
/// format; a tied head's embedding is among them.
void round_to_format(const Exec& exec, const ModelLayout& layout, WeightFormat format,
                     const Tensor& values);

class CodedWeights {
 public:
  /// Zeros. GPUs also have memory for the largest matrix in bf16, without the head if at most
  /// kMaxFewRows rows are multiplied by it.
  CodedWeights(const Exec& exec, const ModelLayout& layout, WeightFormat format,
               int64_t max_head_rows);
  CodedWeights(const CodedWeights&) = delete;
  CodedWeights& operator=(const CodedWeights&) = delete;

  /// Sets the matrices one by one, on exec's device: set(p, views) writes each of their parameters,
  /// in f32. Weights, but not the sums of products, are the same for any number of ranks.
  void set(const ModelLayout& layout, const SetParameter& set);
  /// Bytes of memory, without that for a matrix in bf16.
  size_t bytes() const;
  WeightFormat format() const { return format_; }
  /// Throws std::out_of_range for a matrix other than those.
  const CodedWeight& at(const WeightMatrix& matrix) const { return matrices_.at(matrix.offset); }

  /// out (+)= x x matrix^T. On a GPU more than kMaxFewRows rows, and any with
  /// SameBits::many_rows, are multiplied by the matrix rounded to bf16.
  void multiply(const WeightMatrix& matrix, const Tensor& x, const Tensor& out, SameBits same_bits,
                bool accumulate) const;
  /// CodedWeight::multiply_swiglu, except for SameBits::many_rows.
  bool multiply_swiglu(const WeightMatrix& matrix, const Tensor& x, const Tensor& out,
                       SameBits same_bits) const;
  /// A matrix in bf16 on a GPU, until the next call on its stream.
  Tensor rounded(const WeightMatrix& matrix) const;

 private:
  Exec exec_;
  WeightFormat format_;
  std::map<int64_t, CodedWeight> matrices_;  // by offset
  Memory rounded_;                           // on GPUs
};

}  // namespace tandem
