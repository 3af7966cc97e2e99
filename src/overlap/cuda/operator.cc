#include "overlap/operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <type_traits>

#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/ag_wgrad/cuda/ag_wgrad.h"
#include "overlap/cuda/across_nodes.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"

namespace tandem {
namespace gpu {
namespace {

DenseShape dense_shape(const OperatorSpec& spec) {
  return {spec.m,    spec.n,         spec.k,       spec.dtype,         spec.weight_kn,
          spec.bias, spec.out_dtype, spec.scaling, spec.keep_gathered, spec.add_norm};
}

OperandExtents extents_of(const OperatorSpec& spec) {
  const DenseShape shape = dense_shape(spec);
  return spec.op == OverlapOp::ag_wgrad ? wgrad_extents(shape, spec.x.rows)
                                        : gpu::extents_of(shape, spec.x.rows, spec.out.rows);
}

bool fits(Strategy strategy, Way way) {
  return strategy == Strategy::automatic || (strategy == Strategy::serial) == is_serial(way);
}

template <typename Op>
class GpuOperator final : public OverlapOperator {
 public:
  /// `how`: what Op is constructed from. It gets a fixed way, so that nothing is measured that
  /// `options` rule out.
  template <typename... How>
  GpuOperator(GpuCommunicator& comm, const OperatorSpec& spec, const OverlapOptions& options,
              const How&... how)
      : spec_(spec), op_(comm, lt_context(comm), how...) {
    std::vector<Way> ways = op_.ways(), fitting;
    std::copy_if(ways.begin(), ways.end(), std::back_inserter(fitting),
                 [&](Way way) { return fits(options.strategy, way); });
    // Where nothing overlaps (GEMM+AR in f32) serial is left: ours, whose sums have our order too.
    if (fitting.empty()) {
      std::copy_if(ways.begin(), ways.end(), std::back_inserter(fitting),
                   [](Way way) { return !is_nccl(way); });
    }
    if (!fitting.empty()) ways = fitting;
    std::optional<AddNormScratch> tail;
    if (spec.add_norm) tail.emplace(extents_of(spec).out);
    way_ =
        choose_way(comm, name_of(spec.op), dense_shape(spec), extents_of(spec), ways,
                   [&](Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                       const Tensor* bias, const Scales* scales) {
                     run_way(way, x, weight, out, bias, scales, tail ? &tail->add_norm : nullptr);
                   });
  }

  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
           const Scales* scales, const AddNorm* add_norm) override {
    check_call(spec_, x, weight, out, bias, scales, add_norm);
    // What is stored the other way is the weight, or its gradient.
    const bool other = spec_.weight_kn, gradient = spec_.op == OverlapOp::ag_wgrad;
    run_way(way_, x, other && !gradient ? weight.transposed() : weight,
            other && gradient ? out.transposed() : out, bias, scales, add_norm);
  }
  Strategy strategy() const override {
    return is_serial(way_) ? Strategy::serial : Strategy::overlapped;
  }
  Tensor gathered() const override {
    if constexpr (requires { op_.gathered(); }) {
      if (spec_.keep_gathered) return op_.gathered();
    }
    return OverlapOperator::gathered();
  }

 private:
  void run_way(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
               const Tensor* bias, const Scales* scales, const AddNorm* add_norm) {
    if constexpr (std::is_same_v<Op, gpu::AgWgrad>) {
      op_.run(way, x, weight, out);
    } else if constexpr (requires { op_.run(way, x, weight, out, bias, scales, add_norm); }) {
      op_.run(way, x, weight, out, bias, scales, add_norm);
    } else {
      op_.run(way, x, weight, out, bias, scales);
    }
  }

  OperatorSpec spec_;
  Op op_;
  Way way_;
};

std::unique_ptr<OverlapOperator> make(GpuCommunicator& comm, const OperatorSpec& spec,
                                      const OverlapOptions& options) {
  DenseShape shape = dense_shape(spec);
  if (options.chunks != 0) {
    throw InvalidArgument(fmt::format("{}: chunks {}: expected 0 on GPUs, where the tuner chooses",
                                      name_of(spec.op), options.chunks));
  }
  // All of what decides on the ways, before the first of them is prepared.
  const bool fused =
      options.strategy != Strategy::serial && comm.one_node() && has_fused_kernels(comm);
  comm.require_same(name_of(spec.op), fmt::format("strategy {}{}", name_of(options.strategy),
                                                  fused ? " with kernels for sm_90a" : ""));
  if (shape.scaled() && spec.keep_gathered) {
    throw Unsupported("ag_gemm: keep_gathered with dtype e4m3: expected f32, bf16 or f16");
  }
  if (!comm.one_node()) {
    return std::make_unique<GpuOperator<AcrossNodes>>(comm, spec, options, spec.op, shape);
  }
  const Way way = options.strategy == Strategy::serial ? Way::serial_nccl : Way::fused;
  const auto on_one_node =
      [&]<typename Op>(std::type_identity<Op>) -> std::unique_ptr<OverlapOperator> {
    return std::make_unique<GpuOperator<Op>>(comm, spec, options, shape, way);
  };
  switch (spec.op) {
    case OverlapOp::ag_gemm:
      return on_one_node(std::type_identity<gpu::AgGemm>());
    case OverlapOp::gemm_rs:
      return on_one_node(std::type_identity<gpu::GemmRs>());
    case OverlapOp::gemm_ar:
      return on_one_node(std::type_identity<gpu::GemmAr>());
    case OverlapOp::ag_wgrad:
      return on_one_node(std::type_identity<gpu::AgWgrad>());
  }
  return nullptr;
}

}  // namespace
}  // namespace gpu

std::unique_ptr<OverlapOperator> make_gpu_operator(Communicator& comm, const OperatorSpec& spec,
                                                   const OverlapOptions& options) {
  try {
    return gpu::make(gpu::as_gpu(comm), spec, options);
  } catch (const DeviceError& error) {  // no memory, above all
    throw DeviceError(fmt::format("{} {}: {}", name_of(spec.op), spec.describe(), error.what()));
  }
}

}  // namespace tandem
