// One overlap operator on one kind of rank, and what all of them share: what its operands must look
// like, what the ranks must agree on, and the choice of a plan. The public classes hold one of
// these.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/progress.h"
#include "overlap/plan.h"
#include "tandem/communicator.h"
#include "tandem/overlap.h"
#include "tandem/tensor.h"

namespace tandem {

enum class OverlapOp : uint8_t { ag_gemm, gemm_rs, gemm_ar, ag_wgrad };
std::string_view name_of(OverlapOp op);

/// A matrix that `run` is given.
struct OperandSpec {
  const char* name;
  int64_t rows, columns;
  DType dtype, other;       ///< either is right
  bool any_layout = false;  ///< also with dense columns instead of dense rows
};

/// An operator as one rank sees it.
struct OperatorSpec {
  OverlapOp op;
  int64_t m, n, k;
  DType dtype;
  OperandSpec x, weight, out;
  int64_t chunk_rows;  ///< what chunks divide
  bool keep_gathered = false, bias = false, weight_kn = false;
  bool one_shot_allowed = false, one_shot_preferred = false;
  DType out_dtype = DType::bf16;  ///< e4m3, as the scaling
  Scaling scaling = Scaling::tensor;
  bool add_norm = false;

  /// What the tuner tells apart: "m 512 n 64 k 64 f32".
  std::string describe() const;
};

class OverlapOperator {
 public:
  virtual ~OverlapOperator() = default;
  virtual void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
                   const Scales* scales, const AddNorm* add_norm = nullptr) = 0;
  virtual Strategy strategy() const = 0;
  /// Throws InvalidArgument unless the operator keeps it.
  virtual Tensor gathered() const;
};

/// What is the same on CPU and GPU ranks: throws InvalidArgument where the shape says otherwise of
/// a bias or of how the weight lies, where an output is read-only, and where it overlaps another
/// operand, but for a residual that all of hidden replaces.
void check_call(const OperatorSpec& spec, const Tensor& x, const Tensor& weight, const Tensor& out,
                const Tensor* bias, const Scales* scales, const AddNorm* add_norm);
/// On the CPU, where nothing is scaled: the same, and unless all are what `spec` says.
void check_operands(const OperatorSpec& spec, const Tensor& x, const Tensor& weight,
                    const Tensor& out, const Tensor* bias, const Scales* scales,
                    const AddNorm* add_norm);

/// Collective: the plan unless it is measured. Throws before anything is allocated.
Plan agree(Communicator& comm, const OperatorSpec& spec, const OverlapOptions& options);

using RunPlan = std::function<void(const Plan&, const Tensor&, const Tensor&, const Tensor&,
                                   const Tensor*, const AddNorm*)>;
/// Collective: measures the plans that `options` leave open, on scratch operands.
Plan measured_plan(Communicator& comm, const OperatorSpec& spec, const OverlapOptions& options,
                   const RunPlan& run);

/// Collective: the operator on GPU ranks. Throws Unsupported for a strategy that the shape has no
/// way for.
std::unique_ptr<OverlapOperator> make_gpu_operator(Communicator& comm, const OperatorSpec& spec,
                                                   const OverlapOptions& options);

/// `Cpu` does the work: constructed from the communicator and the public shape.
template <typename Cpu>
class CpuOperator final : public OverlapOperator {
 public:
  template <typename Shape>
  CpuOperator(Communicator& comm, const OperatorSpec& spec, const Shape& shape,
              const OverlapOptions& options)
      : spec_(spec),
        plan_(agree(comm, spec, options)),
        progress_(comm, name_of(spec.op)),
        cpu_(comm, shape) {
    if (options.strategy != Strategy::automatic || comm.size() == 1) return;
    plan_ = measured_plan(comm, spec, options,
                          [this](const Plan& plan, const Tensor& x, const Tensor& weight,
                                 const Tensor& out, const Tensor* bias, const AddNorm* add_norm) {
                            run_plan(plan, x, weight, out, bias, add_norm);
                          });
  }
  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias,
           const Scales* scales, const AddNorm* add_norm) override {
    check_operands(spec_, x, weight, out, bias, scales, add_norm);
    run_plan(plan_, x, weight, out, bias, add_norm);
  }
  Strategy strategy() const override { return plan_.strategy(); }
  Tensor gathered() const override {
    if constexpr (requires { cpu_.gathered(); }) {
      if (spec_.keep_gathered) return cpu_.gathered();
    }
    return OverlapOperator::gathered();
  }

 private:
  void run_plan(const Plan& plan, const Tensor& x, const Tensor& weight, const Tensor& out,
                const Tensor* bias, const AddNorm* add_norm) {
    progress_.during([&] {
      if constexpr (requires { cpu_.run(plan, x, weight, out, bias, add_norm); }) {
        cpu_.run(plan, x, weight, out, bias, add_norm);
      } else if constexpr (requires { cpu_.run(plan, x, weight, out, bias); }) {
        cpu_.run(plan, x, weight, out, bias);
      } else {
        cpu_.run(plan, x, weight, out);
      }
    });
  }

  OperatorSpec spec_;
  Plan plan_;
  Progress progress_;
  Cpu cpu_;
};

/// What a public operator holds. Throws InvalidArgument naming `op` where it was moved from.
OverlapOperator& operator_of(const std::unique_ptr<OverlapOperator>& impl, OverlapOp op);

template <typename Cpu, typename Shape>
std::unique_ptr<OverlapOperator> make_operator(Communicator& comm, const OperatorSpec& spec,
                                               const Shape& shape, const OverlapOptions& options) {
  if (comm.on_gpu()) return make_gpu_operator(comm, spec, options);
  return std::make_unique<CpuOperator<Cpu>>(comm, spec, shape, options);
}

}  // namespace tandem
