#include "overlap/operator.h"

#include <type_traits>

#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/cuda/across_nodes.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"

namespace tandem {
namespace gpu {
namespace {

DenseShape dense_shape(const OperatorSpec& spec) {
  return {spec.m,         spec.n,    spec.k,         spec.dtype,
          spec.weight_kn, spec.bias, spec.out_dtype, spec.scaling};
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
  GpuOperator(NcclCommunicator& comm, const OperatorSpec& spec, const OverlapOptions& options,
              const How&... how)
      : comm_(comm), spec_(spec), op_(comm, lt_context(comm), how...) {
    std::vector<Way> ways = op_.ways();
    if (comm.size() > 1) {
      std::erase_if(ways, [&](Way way) { return !fits(options.strategy, way); });
    }
    if (ways.empty()) {
      throw Unsupported(std::string(name_of(spec.op)) + ": strategy overlapped: expected serial: " +
                        "this shape has no overlapped way on GPUs");
    }
    way_ = choose_way(comm, name_of(spec.op), dense_shape(spec), spec.x.rows, spec.out.rows, ways,
                      [this](Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                             const Tensor* bias,
                             const Scales* scales) { op_.run(way, x, weight, out, bias, scales); });
  }

  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
           const Scales* scales) override {
    op_.run(way_, x, spec_.weight_kn ? weight.transposed() : weight, out, bias, scales);
    if constexpr (requires { op_.gathered(); }) {
      if (spec_.keep_gathered) keep_own_rows(x);
    }
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
  // Overlapped ways read the own rows where they are.
  void keep_own_rows(const Tensor& x) {
    const Shard mine = shard_of(spec_.m, comm_.size(), comm_.rank());
    check(cudaMemcpyAsync(op_.gathered().rows(mine.begin, mine.count).data(), x.data(), x.bytes(),
                          cudaMemcpyDefault, comm_.stream()),
          "keep the own rows");
  }

  NcclCommunicator& comm_;
  OperatorSpec spec_;
  Op op_;
  Way way_;
};

}  // namespace
}  // namespace gpu

std::unique_ptr<OverlapOperator> make_gpu_operator(Communicator& any, const OperatorSpec& spec,
                                                   const OverlapOptions& options) {
  using namespace gpu;
  NcclCommunicator& comm = as_nccl(any);
  if (spec.op == OverlapOp::ag_wgrad) {
    throw Unsupported("ag_wgrad on GPUs: expected ag_gemm, gemm_rs or gemm_ar");
  }
  const DenseShape shape = dense_shape(spec);
  if (shape.scaled() && spec.keep_gathered) {
    throw Unsupported("ag_gemm: keep_gathered with dtype e4m3: expected f32, bf16 or f16");
  }
  if (!comm.one_node()) {
    return std::make_unique<GpuOperator<AcrossNodes>>(comm, spec, options, spec.op, shape);
  }
  const auto make = [&]<typename Op>(std::type_identity<Op>) -> std::unique_ptr<OverlapOperator> {
    return std::make_unique<GpuOperator<Op>>(comm, spec, options, shape, Way::serial_nccl);
  };
  switch (spec.op) {
    case OverlapOp::ag_gemm:
      return make(std::type_identity<gpu::AgGemm>());
    case OverlapOp::gemm_rs:
      return make(std::type_identity<gpu::GemmRs>());
    case OverlapOp::gemm_ar:
    case OverlapOp::ag_wgrad:
      return make(std::type_identity<gpu::GemmAr>());
  }
  return nullptr;
}

}  // namespace tandem
