// Everything that other layers need to know about an overlap operator. Its folder defines its row
// (operator.cc); overlap/registry.cc lists all of them.
#pragma once

#include <memory>
#include <string_view>

#include "overlap/contract/encoded_candidates.h"
#include "overlap/contract/operator.h"
#include "tune/op_desc.h"

namespace tandem {

/// Collective: makes an operator on GPU ranks (cuda/operator.cc of its folder).
using OnGpu = std::unique_ptr<OverlapOperator>(Communicator&, const OpDesc&, const OverlapOptions&);

struct OperatorRow {
  std::string_view name;
  std::string_view class_name;  ///< in C++ and Python
  Collective collective;
  bool gradient = false;       ///< see OpDesc
  bool keep_gathered = false;  ///< the gathered rows may be kept
  bool add_norm = false;       ///< an AddNorm may follow the sum
  /// Descriptor of this rank's operator: `shape` has its sizes, dtypes, options and wire format.
  OpDesc (*describe)(const Communicator&, const OpDesc& shape);
  std::unique_ptr<OverlapOperator> (*on_cpu)(Communicator&, const OpDesc&, const OverlapOptions&,
                                             Choosing);
  OnGpu* on_gpu = nullptr;  ///< null: the operator has no GPU form
  /// Unfused form on CPU ranks; writes operands.out, or adds to it.
  void (*reference)(Communicator&, const Operands&);
  /// Computation without the collective, on all rows of x: out has this rank's rows of every shard,
  /// and the shape of the operator's own output if that is larger.
  void (*gemm)(const Tensor& x, const Tensor& weight, const Tensor& out);
  /// Floating-point operations with the sizes of `desc`, a rank's or the full ones.
  double (*flops)(const OpDesc& desc);
  /// Bytes that each of `ranks` sends, uncompressed.
  int64_t (*bytes)(int ranks, const OpDesc& desc);
  /// Error bound of an element of the result with a wire format. Null: it supports none on GPUs and
  /// is benchmarked without one.
  struct Magnitudes {
    double weight_row;  ///< largest sum of a row's magnitudes; those of x are at most 1
    double partial;     ///< largest of this rank's partial product with all of x
    double expected;    ///< largest of the result
  };
  double (*codec_error)(const OpDesc&, int ranks, const Magnitudes&) = nullptr;
};

/// Descriptor of this rank's shard of a GEMM whose full sizes are those of `whole`.
OpDesc describe_shard(const OperatorRow& row, const Communicator& comm, OpDesc whole);

/// Shape of an operator's class with the sizes, dtypes and those options of `desc` that it has.
template <typename Shape>
Shape shape_of(const OpDesc& desc) {
  Shape shape{.m = desc.m, .n = desc.n, .k = desc.k, .dtype = desc.dtype};
  shape.bias = desc.bias;
  shape.weight_kn = desc.weight_kn;
  shape.out_dtype = desc.out_dtype;
  shape.scaling = desc.scaling;
  if constexpr (requires { shape.keep_gathered; }) shape.keep_gathered = desc.keep_gathered;
  if constexpr (requires { shape.add_norm; }) shape.add_norm = desc.add_norm;
  return shape;
}

/// Descriptor of a GEMM of `shape` on this operator's rows, without what only the operator knows.
template <typename Shape>
OpDesc gemm_desc(const OperatorRow& row, const Shape& shape) {
  return {.m = shape.m,
          .n = shape.n,
          .k = shape.k,
          .dtype = shape.dtype,
          .weight_kn = shape.weight_kn,
          .bias = shape.bias,
          .out_dtype = shape.out_dtype,
          .scaling = shape.scaling,
          .op = row.name,
          .collective = row.collective,
          .weight = {"weight", shape.n, shape.k, shape.dtype, shape.dtype, true}};
}

/// A row's `describe`, for the function that makes its class's descriptor.
template <typename Shape, OpDesc (*make_desc)(const Communicator&, const Shape&)>
OpDesc describe_as(const Communicator& comm, const OpDesc& desc) {
  return encoded(make_desc(comm, shape_of<Shape>(desc)),
                 {.wire = desc.wire, .allow_uncompressed = desc.allow_uncompressed});
}

/// CPU factory of a row, for CpuOperator's `Cpu`.
template <typename Cpu>
std::unique_ptr<OverlapOperator> make_on_cpu(Communicator& comm, const OpDesc& desc,
                                             const OverlapOptions& options, Choosing choosing) {
  return std::make_unique<CpuOperator<Cpu>>(comm, desc, options, choosing);
}

/// Collective: the operator on this communicator's kind of rank. Throws Unsupported on GPUs for one
/// without a GPU form.
std::unique_ptr<OverlapOperator> make_operator(const OperatorRow& row, Communicator& comm,
                                               const OpDesc& desc, const OverlapOptions& options,
                                               Choosing choosing);

/// Error bound of an element sent as `wire`, relative to its group's largest magnitude: the
/// format's loss, and the rounding of the decoded value.
double error_of_wire(const Wire& wire, DType dtype);

// Values of a row for a GEMM and a collective.
void multiply(const Tensor& x, const Tensor& weight, const Tensor& out);  ///< x weight^T
double gemm_flops(const OpDesc& desc);
int64_t gathered_bytes(int ranks, const OpDesc& desc);
int64_t scattered_bytes(int ranks, const OpDesc& desc);
double gathered_error(const OpDesc& desc, int ranks, const OperatorRow::Magnitudes& of);
double scattered_error(const OpDesc& desc, int ranks, const OperatorRow::Magnitudes& of);
double summed_error(const OpDesc& desc, int ranks, const OperatorRow::Magnitudes& of);

}  // namespace tandem
