#include <fmt/format.h>

#include "overlap/ag_gemm/cpu.h"
#include "overlap/check.h"
#include "overlap/tuner.h"

namespace tandem {

class AgGemm::Impl {
 public:
  Impl(Communicator& comm, const Shape& shape, const OverlapOptions& options)
      : shape_(shape),
        rows_(shard_of(shape.m, comm.size(), comm.rank()).count),
        plan_(agree(comm, shape, options)),
        cpu_(comm, shape) {
    if (options.strategy == Strategy::automatic && comm.size() > 1) tune_plan(comm, options);
  }

  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias) {
    check_rows("ag_gemm", "x", x, rows_, shape_.k, shape_.dtype, shape_.dtype);
    check_matrix("ag_gemm", "weight", weight, shape_.n, shape_.k, shape_.dtype);
    check_rows("ag_gemm", "out", out, shape_.m, shape_.n, shape_.dtype, DType::f32);
    check_bias("ag_gemm", bias, shape_.n, out.dtype());
    cpu_.run(plan_, x, weight, out, bias);
  }

  Tensor gathered() const {
    if (!shape_.keep_gathered) {
      throw InvalidArgument("ag_gemm: gathered() of an operator without keep_gathered");
    }
    return cpu_.gathered();
  }
  Strategy strategy() const { return plan_.strategy(); }

 private:
  /// The plan unless it is measured; throws before anything is allocated.
  static Plan agree(Communicator& comm, const Shape& s, const OverlapOptions& options) {
    check_shape("ag_gemm", s.m, s.n, s.k, s.dtype);
    const Plan plan = fixed_plan("ag_gemm", options, s.m / comm.size());
    comm.require_same("ag_gemm",
                      fmt::format("m {} k {} {} {} chunks {}", s.m, s.k, name_of(s.dtype),
                                  name_of(options.strategy), options.chunks));
    return plan;
  }

  void tune_plan(Communicator& comm, const OverlapOptions& options) {
    const Buffer x(size_t(rows_ * shape_.k) * size_of(shape_.dtype));
    const Buffer w(size_t(shape_.n * shape_.k) * size_of(shape_.dtype));
    const Buffer out(size_t(shape_.m * shape_.n) * size_of(shape_.dtype));
    const Tensor x_rows = x.view(shape_.dtype, {rows_, shape_.k});
    const Tensor weight = w.view(shape_.dtype, {shape_.n, shape_.k});
    const Tensor result = out.view(shape_.dtype, {shape_.m, shape_.n});
    const auto plans = candidates(options, shape_.m / comm.size());
    plan_ = tune(comm, "ag_gemm",
                 fmt::format("m {} n {} k {} {}{}", shape_.m, shape_.n, shape_.k,
                             name_of(shape_.dtype), shape_.keep_gathered ? " keep" : ""),
                 plans, [&](const Plan& plan) { cpu_.run(plan, x_rows, weight, result, nullptr); });
  }

  Shape shape_;
  int64_t rows_;
  Plan plan_;
  AgGemmCpu cpu_;
};

AgGemm::AgGemm(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(std::make_unique<Impl>(comm, shape, options)) {}
AgGemm::~AgGemm() = default;

void AgGemm::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias) {
  impl_->run(x, weight, out, bias);
}
Tensor AgGemm::gathered() const {
  return impl_->gathered();
}
Strategy AgGemm::strategy() const {
  return impl_->strategy();
}

}  // namespace tandem
