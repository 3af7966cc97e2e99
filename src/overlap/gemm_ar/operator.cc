#include <fmt/format.h>

#include "overlap/check.h"
#include "overlap/gemm_ar/cpu.h"
#include "overlap/tuner.h"

namespace tandem {

class GemmAr::Impl {
 public:
  Impl(Communicator& comm, const Shape& shape, const OverlapOptions& options)
      : shape_(shape), out_rows_(shape.m), plan_(agree(comm, shape, options)), cpu_(comm, shape) {
    if (options.strategy == Strategy::automatic && comm.size() > 1) tune_plan(comm, options);
  }

  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias) {
    check_rows("gemm_ar", "x", x, shape_.m, shape_.k, shape_.dtype, shape_.dtype);
    check_matrix("gemm_ar", "weight", weight, shape_.n, shape_.k, shape_.dtype);
    check_rows("gemm_ar", "out", out, out_rows_, shape_.n, shape_.dtype, shape_.dtype);
    check_bias("gemm_ar", bias, shape_.n, out.dtype());
    cpu_.run(plan_, x, weight, out, bias);
  }
  Strategy strategy() const { return plan_.strategy(); }

 private:
  /// The plan unless it is measured; throws before anything is allocated.
  static Plan agree(Communicator& comm, const Shape& s, const OverlapOptions& options) {
    check_shape("gemm_ar", s.m, s.n, s.k, s.dtype);
    Plan plan = fixed_plan("gemm_ar", options, s.m);
    if (!plan.overlapped) plan.one_shot = one_shot_preferred(s);
    comm.require_same("gemm_ar",
                      fmt::format("m {} n {} {} {} chunks {}", s.m, s.n, name_of(s.dtype),
                                  name_of(options.strategy), options.chunks));
    return plan;
  }

  void tune_plan(Communicator& comm, const OverlapOptions& options) {
    const Buffer x(size_t(shape_.m * shape_.k) * size_of(shape_.dtype));
    const Buffer w(size_t(shape_.n * shape_.k) * size_of(shape_.dtype));
    const Buffer out(size_t(out_rows_ * shape_.n) * size_of(shape_.dtype));
    const Tensor x_rows = x.view(shape_.dtype, {shape_.m, shape_.k});
    const Tensor weight = w.view(shape_.dtype, {shape_.n, shape_.k});
    const Tensor result = out.view(shape_.dtype, {out_rows_, shape_.n});
    auto plans = candidates(options, shape_.m);
    if (one_shot_allowed(shape_)) plans.insert(plans.begin() + 1, Plan{false, 1, true});
    plan_ =
        tune(comm, "gemm_ar",
             fmt::format("m {} n {} k {} {}", shape_.m, shape_.n, shape_.k, name_of(shape_.dtype)),
             plans, [&](const Plan& plan) { cpu_.run(plan, x_rows, weight, result, nullptr); });
  }

  Shape shape_;
  int64_t out_rows_;
  Plan plan_;
  GemmArCpu cpu_;
};

GemmAr::GemmAr(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(std::make_unique<Impl>(comm, shape, options)) {}
GemmAr::~GemmAr() = default;

void GemmAr::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias) {
  impl_->run(x, weight, out, bias);
}
Strategy GemmAr::strategy() const {
  return impl_->strategy();
}

}  // namespace tandem
