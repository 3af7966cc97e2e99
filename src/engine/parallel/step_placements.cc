#include "engine/parallel/step_placements.h"

#include <optional>
#include <string>
#include <utility>

#include "engine/model/stage_placements.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"

namespace tandem {
namespace {

constexpr Axes kAllAxes{Axis::tp, Axis::cp, Axis::ep, Axis::expert_dp, Axis::pp};

/// Sum of scalars with equal placements.
class Sum {
 public:
  void add(const PlacedTensor& term, const char* name) {
    sum_ = sum_ ? placement::add(*sum_, term, name) : PlacedTensor{name, "add", term.placements};
  }
  const std::optional<PlacedTensor>& get() const { return sum_; }

 private:
  std::optional<PlacedTensor> sum_;
};

std::string reduced_name(const Parameter& p) {
  return gradient_name(p.name) + ", reduced";
}

void declare_sync(const CopiedParameters& parameters, PlacementTable& table) {
  for (const Parameter& p : parameters.list) {
    if (p.sharding.absent) continue;
    table.add(placement::gradient_sync(table.at(gradient_name(p.name)), table.at(p.name),
                                       parameters.copies, reduced_name(p)));
  }
}

/// Squares of copies on all tp ranks are counted on one of these.
const PlacedTensor& declare_norm(std::span<const CopiedParameters> parameters,
                                 PlacementTable& table) {
  Sum sharded, replicated, all;
  for (const CopiedParameters& copied : parameters) {
    for (const Parameter& p : copied.list) {
      if (p.sharding.absent) continue;
      const PlacedTensor& reduced = table.at(reduced_name(p));
      const PlacedTensor squares = placement::sum_of_squares(reduced, reduced.name + ", squares");
      if (squares.over(Axis::tp) == placement::kReplicated) {
        replicated.add(squares, "squares.replicated");
      } else {
        sharded.add(squares, "squares.sharded");
      }
    }
  }
  if (sharded.get()) all.add(table.add(*sharded.get()), "squares");
  if (replicated.get()) {
    all.add(placement::count_once(table.add(*replicated.get()), kTp, "squares.replicated, once"),
            "squares");
  }
  return table.add(placement::all_reduce(table.add(*all.get()), kAllAxes, "grad_norm"));
}

/// Stages without a head count a loss of 0, and stages without experts an auxiliary loss of 0.
void declare_losses(PlacementTable& table) {
  Sum aux;
  std::optional<PlacedTensor> loss;
  for (const PlacedTensor& tensor : table.tensors()) {
    if (tensor.made_by == "aux_loss") {
      aux.add(placement::count_once(tensor, kPp, tensor.name), "aux_loss, of stages");
    }
    if (tensor.name == "loss") loss = tensor;
  }
  if (aux.get()) table.add(placement::all_reduce(table.add(*aux.get()), kPp, "aux_loss"));
  if (!loss) return;
  const PlacedTensor once = placement::count_once(*loss, {Axis::tp, Axis::pp}, "loss, once");
  table.add(placement::all_reduce(table.add(once), kAllAxes, "loss, of all ranks"));
}

void check_received(const PlacedTensor& sent, const std::optional<PlacedTensor>& received) {
  if (!received) return;
  const PlacedTensor arrived =
      placement::send(sent, Axis::pp, received->over(Axis::pp).rank(), sent.name + ", received");
  for (int axis = 0; axis < kNumLearnerAxes; ++axis) {
    placement::expect("receive", arrived, Axis(axis), received->over(Axis(axis)));
  }
}

}  // namespace

std::vector<CopiedParameters> split_experts(std::span<const Parameter> list) {
  CopiedParameters dense{{}, kCopies}, experts{{}, kExpertCopies};
  for (const Parameter& p : list) (p.sharding.over_ep() ? experts : dense).list.push_back(p);
  return {dense, experts};
}

void declare_step(std::span<const CopiedParameters> parameters, PlacementTable& table) {
  for (const CopiedParameters& copied : parameters) declare_sync(copied, table);
  const PlacedTensor& norm = declare_norm(parameters, table);
  for (const CopiedParameters& copied : parameters) {
    for (const Parameter& p : copied.list) {
      if (p.sharding.absent) continue;
      table.add(placement::update(table.at(reduced_name(p)), table.at(p.name), norm, copied.copies,
                                  p.name + ", updated"));
    }
  }
  declare_losses(table);
}

PlacementTable step_placements(const ModelConfig& model, const ParallelConfig& parallel) {
  const ParallelDims dims(parallel);
  PlacementTable table;
  std::vector<Parameter> parameters;
  std::optional<StageMessages> before;
  for (const StageLayers& layers : pipeline_layers(parallel, model.layers)) {
    // Passes on what it receives.
    if (layers.count == 0 && !layers.embedding && !layers.head) continue;
    const ModelLayout layout(model, dims.tp(), 0, {dims.ep(), 0}, layers);
    const StageMessages messages = declare_stage(model, layout, layers, table);
    if (before) {
      check_received(before->output, messages.input);
      check_received(messages.d_input, before->d_output);
    }
    before = messages;
    for (const Parameter& p : layout.parameters) {
      if (!p.sharding.absent) parameters.push_back(p);
    }
  }
  declare_step(split_experts(parameters), table);
  return table;
}

}  // namespace tandem
