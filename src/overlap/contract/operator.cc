#include "overlap/contract/operator.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "codec/whole.h"
#include "comm/workspace.h"
#include "core/operands.h"
#include "core/random_buffer.h"
#include "overlap/contract/check.h"
#include "tune/measure.h"

namespace tandem {
namespace {

struct Scratch {
  Memory memory;
  Tensor tensor;
  /// `by_columns`: columns are dense.
  explicit Scratch(const OperandDesc& d, bool by_columns = false)
      : memory(random_buffer(d.dtype, d.rows * d.columns, 1)),
        tensor(by_columns ? memory.view(d.dtype, {d.columns, d.rows}).transposed()
                          : memory.view(d.dtype, {d.rows, d.columns})) {}
};

struct AddNormScratch {
  Scratch residual, hidden, gain;
  AddNorm add_norm;
  explicit AddNormScratch(const OperandDesc& out)
      : residual(out), hidden(out), gain({"gain", 1, out.columns, out.dtype, out.dtype}) {
    add_norm = {residual.tensor, gain.memory.view(out.dtype, {out.columns}), hidden.tensor, 1e-5f};
  }
};

}  // namespace

OverlapOperator& operator_of(const std::unique_ptr<OverlapOperator>& impl, std::string_view op) {
  if (impl) return *impl;
  throw InvalidArgument(fmt::format("{}: called on an operator that was moved from", op));
}

Strategy strategy_of(const std::unique_ptr<OverlapOperator>& impl, std::string_view op) {
  return operator_of(impl, op).chosen().form;
}

OverlapOperator::OverlapOperator(const Communicator& comm, const OpDesc& desc,
                                 const OverlapOptions& options)
    : desc_(desc),
      strict_(options.strict),
      receipt_(list_receipt({.op = std::string(desc.op),
                             .shape = describe(desc),
                             .dtype = std::string(name_of(desc.dtype)),
                             .group = comm.size(),
                             .asked = options.strategy})) {}

void OverlapOperator::run(const Operands& operands) {
  check(operands);
  ++receipt_->calls;
  candidates_[chosen_].run(operands);
}

void OverlapOperator::note_refusals(const std::vector<Candidate>& all) {
  for (const Candidate& one : all) {
    if (one.refusal.empty()) continue;
    refusals_ += fmt::format("{}{}: {}", refusals_.empty() ? "" : "; ", one.name, one.refusal);
  }
}

void OverlapOperator::choose_by(const Choice& choice) {
  chosen_ = choice;
  std::vector<NamedForm> forms;
  for (const Candidate& candidate : candidates_) forms.push_back({candidate.name, candidate.form});
  record_choice(*receipt_, forms, choice.us, chosen_, refusals_);
  require_as_asked(*receipt_, strict_);
}

Tensor OverlapOperator::gathered() const {
  throw InvalidArgument(
      fmt::format("{}: gathered() of an operator without keep_gathered", desc_.op));
}

void check_call(const OpDesc& desc, const Operands& operands) {
  const auto& [x, weight, out, bias, scales, add_norm, accumulate] = operands;
  check_bias(desc.op, desc.bias, bias);
  if (desc.out.any_layout) {
    check_layout(desc.op, desc.out.name, out, desc.weight_kn);
  } else {
    check_layout(desc.op, desc.weight.name, weight, desc.weight_kn);
  }
  const Tensor* hidden = add_norm ? &add_norm->hidden : nullptr;
  const Tensor* residual = add_norm ? &add_norm->residual : nullptr;
  const bool in_place = add_norm && hidden->data() == residual->data() && hidden->dims() == 2 &&
                        residual->dims() == 2 && hidden->stride(0) == residual->stride(0);
  require_apart(desc.op, {{desc.out.name, &out}, {"hidden", hidden}},
                {{desc.x.name, &x},
                 {desc.weight.name, &weight},
                 {"bias", bias},
                 {"scales.x", scales ? &scales->x : nullptr},
                 {"scales.weight", scales ? &scales->weight : nullptr},
                 {"gain", add_norm ? &add_norm->gain : nullptr},
                 {"residual", in_place ? nullptr : residual}});
}

void check_operands(const OpDesc& desc, const Operands& operands) {
  const auto& [x, weight, out, bias, scales, add_norm, accumulate] = operands;
  const auto check = [&](const OperandDesc& d, const Tensor& tensor) {
    if (d.any_layout) {
      check_matrix(desc.op, d.name, tensor, d.rows, d.columns, d.dtype);
    } else {
      check_rows(desc.op, d.name, tensor, d.rows, d.columns, d.dtype, d.other);
    }
  };
  check(desc.x, x);
  check(desc.weight, weight);
  check(desc.out, out);
  check_bias(desc.op, desc.bias, bias);
  if (bias) check_vector(desc.op, "bias", *bias, desc.n, out.dtype());
  check_scales(desc, scales);
  check_add_norm(desc.op, desc.add_norm, add_norm);
  if (add_norm) {
    const DType dtype = out.dtype();
    const auto check_other = [&](const char* name, const Tensor& tensor) {
      check_rows(desc.op, name, tensor, desc.out.rows, desc.n, dtype, dtype);
    };
    check_other("residual", add_norm->residual);
    check_other("hidden", add_norm->hidden);
    check_vector(desc.op, "gain", add_norm->gain, desc.n, dtype);
  }
  check_call(desc, operands);
}

std::string name_on_card(Communicator& comm, const OpDesc& desc) {
  return fmt::format("{} m {}, n {}, k {}, operator {}", desc.op, desc.m, desc.n, desc.k,
                     ++comm.workspace().operators);
}

void use_operands(CallOnCard& call, const OpDesc& desc, const Operands& operands) {
  const auto& [x, weight, out, bias, scales, add_norm, accumulate] = operands;
  call.writes(desc.out.name, out);
  call.reads(desc.x.name, x);
  call.reads(desc.weight.name, weight);
  if (bias) call.reads("bias", *bias);
  if (scales) {
    call.reads("scales.x", scales->x);
    call.reads("scales.weight", scales->weight);
  }
  if (!add_norm) return;
  call.writes("hidden", add_norm->hidden);
  call.reads("residual", add_norm->residual);
  call.reads("gain", add_norm->gain);
}

void agree(Communicator& comm, const OpDesc& desc, const OverlapOptions& options) {
  check_shape(desc);
  const Wire& wire = options.wire.is_none() ? desc.wire : options.wire;
  if (!wire.is_none()) {
    codec::require_encodable(
        wire, desc.collective == Collective::all_gather ? desc.dtype : desc.partial());
  }
  chunk_counts(desc.op, options, desc.chunk_rows);  // throws for unsupported chunk counts
  comm.require_same(desc.op,
                    fmt::format("{} {} chunks {}{}", agreement(desc), name_of(options.strategy),
                                options.chunks, strictness(options.strict)));
}

Choice choose_candidate(Communicator& comm, const OpDesc& desc, const OverlapOptions& options,
                        const std::vector<Candidate>& candidates) {
  if (options.strategy == Strategy::serial) return {};
  if (options.strategy == Strategy::overlapped || comm.size() == 1) {
    const auto overlapped = std::ranges::find(candidates, Strategy::overlapped, &Candidate::form);
    return {overlapped == candidates.end() ? 0 : size_t(overlapped - candidates.begin()), {}};
  }
  const Scratch x(desc.x), weight(desc.weight, desc.weight_kn && desc.weight.any_layout),
      out(desc.out, desc.weight_kn && desc.out.any_layout),
      bias({"bias", 1, desc.bias ? desc.n : 0, desc.out.dtype, desc.out.dtype});
  const Tensor added = bias.memory.view(desc.out.dtype, {desc.bias ? desc.n : 0});
  std::optional<AddNormScratch> tail;
  if (desc.add_norm) tail.emplace(desc.out);
  const int64_t x_scales = desc.scaled_by_row() ? desc.x.rows : 1;
  const int64_t weight_scales = desc.scaled_by_row() ? desc.n : 1;
  const Memory x_memory = random_buffer(DType::f32, x_scales, 2);
  const Memory weight_memory = random_buffer(DType::f32, weight_scales, 3);
  const Scales scales{x_memory.view(DType::f32, {x_scales}),
                      weight_memory.view(DType::f32, {weight_scales})};
  const Operands operands{x.tensor,
                          weight.tensor,
                          out.tensor,
                          desc.bias ? &added : nullptr,
                          desc.scaled() ? &scales : nullptr,
                          tail ? &tail->add_norm : nullptr};
  std::vector<std::string> names;
  for (const Candidate& candidate : candidates) names.push_back(candidate.name);
  return tune(
      comm, desc.op, describe(desc), names,
      [&](size_t i) { return timed(comm, [&] { candidates[i].run(operands); })(); },
      desc.allow_uncompressed ? Bits::by_candidate : Bits::same);
}

}  // namespace tandem
