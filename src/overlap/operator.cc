#include "overlap/operator.h"

#include <fmt/format.h>

#include <optional>

#include "core/operands.h"
#include "core/random_buffer.h"
#include "overlap/check.h"
#include "overlap/measure.h"
#include "overlap/tuner.h"

namespace tandem {
namespace {

struct Scratch {
  Buffer memory;
  Tensor tensor;
  /// `by_columns`: columns are dense.
  explicit Scratch(const OperandSpec& s, bool by_columns = false)
      : memory(random_buffer(s.dtype, s.rows * s.columns, 1)),
        tensor(by_columns ? memory.view(s.dtype, {s.columns, s.rows}).transposed()
                          : memory.view(s.dtype, {s.rows, s.columns})) {}
};

struct AddNormScratch {
  Scratch residual, hidden, gain;
  AddNorm add_norm;
  explicit AddNormScratch(const OperandSpec& out)
      : residual(out), hidden(out), gain({"gain", 1, out.columns, out.dtype, out.dtype}) {
    add_norm = {residual.tensor, gain.memory.view(out.dtype, {out.columns}), hidden.tensor, 1e-5f};
  }
};

}  // namespace

std::string_view name_of(OverlapOp op) {
  switch (op) {
    case OverlapOp::ag_gemm:
      return "ag_gemm";
    case OverlapOp::gemm_rs:
      return "gemm_rs";
    case OverlapOp::gemm_ar:
      return "gemm_ar";
    case OverlapOp::ag_wgrad:
      return "ag_wgrad";
  }
  return "?";
}

std::string OperatorSpec::describe() const {
  return fmt::format("m {} n {} k {} {}{}{}{}{}", m, n, k, name_of(dtype),
                     keep_gathered ? " keep" : "", bias ? " bias" : "", weight_kn ? " kn" : "",
                     add_norm ? " add_norm" : "");
}

OverlapOperator& operator_of(const std::unique_ptr<OverlapOperator>& impl, OverlapOp op) {
  if (impl) return *impl;
  throw InvalidArgument(fmt::format("{}: called on an operator that was moved from", name_of(op)));
}

Tensor OverlapOperator::gathered() const {
  throw InvalidArgument("ag_gemm: gathered() of an operator without keep_gathered");
}

void check_call(const OperatorSpec& spec, const Tensor& x, const Tensor& weight, const Tensor& out,
                const Tensor* bias, const Scales* scales, const AddNorm* add_norm) {
  const std::string_view op = name_of(spec.op);
  check_bias(op, spec.bias, bias);
  if (spec.out.any_layout) {
    check_layout(op, spec.out.name, out, spec.weight_kn);
  } else {
    check_layout(op, spec.weight.name, weight, spec.weight_kn);
  }
  const Tensor* hidden = add_norm ? &add_norm->hidden : nullptr;
  const Tensor* residual = add_norm ? &add_norm->residual : nullptr;
  const bool in_place = add_norm && hidden->data() == residual->data() && hidden->dims() == 2 &&
                        residual->dims() == 2 && hidden->stride(0) == residual->stride(0);
  require_apart(op, {{spec.out.name, &out}, {"hidden", hidden}},
                {{spec.x.name, &x},
                 {spec.weight.name, &weight},
                 {"bias", bias},
                 {"scales.x", scales ? &scales->x : nullptr},
                 {"scales.weight", scales ? &scales->weight : nullptr},
                 {"gain", add_norm ? &add_norm->gain : nullptr},
                 {"residual", in_place ? nullptr : residual}});
}

void check_operands(const OperatorSpec& spec, const Tensor& x, const Tensor& weight,
                    const Tensor& out, const Tensor* bias, const Scales* scales,
                    const AddNorm* add_norm) {
  const std::string_view op = name_of(spec.op);
  const auto check = [&](const OperandSpec& s, const Tensor& tensor) {
    if (s.any_layout) {
      check_matrix(op, s.name, tensor, s.rows, s.columns, s.dtype);
    } else {
      check_rows(op, s.name, tensor, s.rows, s.columns, s.dtype, s.other);
    }
  };
  check(spec.x, x);
  check(spec.weight, weight);
  check(spec.out, out);
  check_bias(op, spec.bias, bias);
  if (bias) check_vector(op, "bias", *bias, spec.n, out.dtype());
  if (scales) {
    throw InvalidArgument(
        fmt::format("{}: scales given: expected none with dtype {}", op, name_of(spec.dtype)));
  }
  check_add_norm(op, spec.add_norm, add_norm);
  if (add_norm) {
    check_rows(op, "residual", add_norm->residual, spec.out.rows, spec.n, out.dtype(), out.dtype());
    check_rows(op, "hidden", add_norm->hidden, spec.out.rows, spec.n, out.dtype(), out.dtype());
    check_vector(op, "gain", add_norm->gain, spec.n, out.dtype());
  }
  check_call(spec, x, weight, out, bias, scales, add_norm);
}

Plan agree(Communicator& comm, const OperatorSpec& spec, const OverlapOptions& options) {
  const std::string_view op = name_of(spec.op);
  check_shape(op, spec.m, spec.n, spec.k, spec.dtype);
  Plan plan = fixed_plan(op, options, spec.chunk_rows);
  if (!plan.overlapped) plan.one_shot = spec.one_shot_preferred;
  const bool gathers = spec.op == OverlapOp::ag_gemm || spec.op == OverlapOp::ag_wgrad;
  comm.require_same(op, fmt::format("m {} {} {} {} {} chunks {}{}", spec.m, gathers ? "k" : "n",
                                    gathers ? spec.k : spec.n, name_of(spec.dtype),
                                    name_of(options.strategy), options.chunks,
                                    fmt::format("{}{}{}", spec.bias ? " bias" : "",
                                                spec.weight_kn ? " weight_kn" : "",
                                                spec.add_norm ? " add_norm" : "")));
  return plan;
}

Plan measured_plan(Communicator& comm, const OperatorSpec& spec, const OverlapOptions& options,
                   const RunPlan& run) {
  const Scratch x(spec.x), weight(spec.weight, spec.weight_kn && spec.weight.any_layout),
      out(spec.out, spec.weight_kn && spec.out.any_layout),
      bias({"bias", 1, spec.bias ? spec.n : 0, spec.out.dtype, spec.out.dtype});
  const Tensor added = bias.memory.view(spec.out.dtype, {spec.bias ? spec.n : 0});
  auto plans = candidates(options, spec.chunk_rows);
  if (spec.one_shot_allowed) plans.insert(plans.begin() + 1, Plan{false, 1, true});
  std::optional<AddNormScratch> tail;
  if (spec.add_norm) tail.emplace(spec.out);
  return tune(comm, name_of(spec.op), spec.describe(), plans, [&](const Plan& plan) {
    return timed(comm, [&] {
      run(plan, x.tensor, weight.tensor, out.tensor, spec.bias ? &added : nullptr,
          tail ? &tail->add_norm : nullptr);
    })();
  });
}

}  // namespace tandem
