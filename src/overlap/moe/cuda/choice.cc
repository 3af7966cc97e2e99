// Choice of the fastest candidates of an MoE layer's passes, by measurement.
#include <fmt/format.h>

#include "comm/world/gpus.h"
#include "core/cuda/fill.h"
#include "core/cuda/upload.h"
#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/cuda/memory.h"
#include "overlap/moe/load.h"
#include "tune/cuda/measure.h"
#include "tune/tuner.h"

namespace tandem::gpu {
namespace {

/// Operands of a forward pass with evenly spread rows: the routing of a real call is not known yet.
struct ForwardOperands {
  ForwardOperands(GpuCommunicator& comm, const MoeRankCoords& coords, const MoeSpace& space)
      : x_memory(values(space.tokens, space.hidden)),
        in_memory(values(coords.experts.count * 2 * coords.ffn, space.hidden)),
        w_out_memory(values(coords.experts.count * space.hidden, coords.ffn)),
        out_memory(values(space.tokens, space.hidden)),
        experts(uploaded(chosen_experts(coords.grid, space.top_k, {1, 1},
                                        space.tokens * coords.rank, space.tokens))),
        weights(ints(space.routings())),
        x(x_memory.view(coords.shape.dtype, {space.tokens, space.hidden})),
        w_in(in_memory.view(coords.shape.dtype,
                            {coords.experts.count * 2 * coords.ffn, space.hidden})),
        w_out(w_out_memory.view(coords.shape.dtype,
                                {coords.experts.count * space.hidden, coords.ffn})),
        out(out_memory.view(coords.shape.dtype, {space.tokens, space.hidden})),
        routing{experts.view(DType::i32, {space.tokens, space.top_k}),
                weights.view(DType::f32, {space.tokens, space.top_k})} {
    uint64_t stream = 0;
    for (const Tensor& each : {x, w_in, w_out, routing.weights}) {
      fill_uniform(each, 1, ++stream, 0, comm.stream());
    }
  }
  DeviceMemory x_memory, in_memory, w_out_memory, out_memory, experts, weights;
  Tensor x, w_in, w_out, out;
  MoeRouting routing;
};

/// Additional operands of a backward pass, whose weights' gradients are stored as the weights.
struct BackwardOperands {
  BackwardOperands(GpuCommunicator& comm, const ForwardOperands& of)
      : dout_memory(of.x.bytes()),
        dx_memory(of.x.bytes()),
        dweights_memory(of.routing.weights.bytes()),
        dw_in_memory(of.w_in.bytes()),
        dw_out_memory(of.w_out.bytes()),
        dout(dout_memory.view(of.x.dtype(), {of.x.dim(0), of.x.dim(1)})),
        dx(dx_memory.view(of.x.dtype(), {of.x.dim(0), of.x.dim(1)})),
        dweights(dweights_memory.view(DType::f32,
                                      {of.routing.weights.dim(0), of.routing.weights.dim(1)})),
        dw_in(dw_in_memory.view(of.w_in.dtype(), {of.w_in.dim(0), of.w_in.dim(1)})),
        dw_out(dw_out_memory.view(of.w_out.dtype(), {of.w_out.dim(0), of.w_out.dim(1)})) {
    fill_uniform(dout, 1, 5, 0, comm.stream());
  }
  DeviceMemory dout_memory, dx_memory, dweights_memory, dw_in_memory, dw_out_memory;
  Tensor dout, dx, dweights, dw_in, dw_out;
};

template <typename Candidates>
std::vector<std::string> list_names(const Candidates& candidates) {
  std::vector<std::string> names;
  for (const auto& candidate : candidates) names.push_back(candidate.name);
  return names;
}

}  // namespace

std::string MoeOnGpus::tuning_key(const MoeOptions& options, const char* pass) const {
  return fmt::format("{} | {} | {} x{} | moe {}{}{}", this_machines_gpus().name, comm_.transport(),
                     comm_.link(), comm_.size(), coords_.describe(), wires_of(options), pass);
}

void MoeOnGpus::choose(const MoeOptions& options) {
  std::unique_ptr<ForwardOperands> f;
  std::unique_ptr<MoeSavedActivations> activations;
  const auto make_operands = [&] {
    if (f) return;
    comm_.agree_on("moe: memory to measure on", [&] {
      f = std::make_unique<ForwardOperands>(comm_, coords_, space_);
      activations = make_saved();
    });
  };
  const auto run_forward = [&](size_t candidate) {
    run(candidate, f->x, f->routing, f->w_in, f->w_out, f->out, activations.get());
  };
  const auto measure = [&](const std::vector<std::string>& names,
                           const std::function<void(size_t)>& run_one) {
    std::vector<BoundCandidate> alternatives;
    for (size_t i = 0; i < names.size(); ++i) {
      alternatives.push_back({.name = names[i], .run = [&, i] { run_one(i); }});
    }
    std::vector<double> us;
    for (const Timing& timing : Stopwatch(comm_).measure(alternatives, {.repeats = 9})) {
      us.push_back(timing.median_us);
    }
    return us;
  };
  Choice forward_choice, backward_choice;
  if (candidates_.size() > 1) {
    const std::vector<std::string> names = list_names(candidates_);
    forward_choice = tandem::choose(
        comm_, tuning_key(options, trains() ? " for backward" : ""), names,
        [&] {
          make_operands();
          return measure(names, run_forward);
        },
        kOverSerial);
    chosen_ = forward_choice;
  }
  if (backward_candidates_.size() > 1) {
    const std::vector<std::string> names = list_names(backward_candidates_);
    backward_choice = tandem::choose(
        comm_, tuning_key(options, " backward"), names,
        [&] {
          make_operands();
          std::unique_ptr<BackwardOperands> b;
          comm_.agree_on("moe: memory to measure a backward pass on",
                         [&] { b = std::make_unique<BackwardOperands>(comm_, *f); });
          run_forward(chosen_);
          return measure(names, [&](size_t candidate) {
            run_backward(candidate, b->dout, f->w_in, f->w_out, *activations, b->dx, b->dweights,
                         b->dw_in, b->dw_out, WeightGradients::store);
          });
        },
        kOverSerial);
    chosen_backward_ = backward_choice;
  }
  record(forward_choice, backward_choice);
}

void MoeOnGpus::record(const Choice& forward_choice, const Choice& backward_choice) {
  const auto named = [](const auto& candidates) {
    std::vector<NamedForm> forms;
    for (const auto& candidate : candidates) forms.push_back({candidate.name, candidate.form});
    return forms;
  };
  record_choice(forward_receipt_, named(candidates_), forward_choice.us, chosen_,
                coords_.shape.tokens == 0 ? "no rank has rows" : "");
  if (!backward_receipt_ || backward_candidates_.empty()) return;
  record_choice(*backward_receipt_, named(backward_candidates_), backward_choice.us,
                chosen_backward_,
                comm_.has_whole_gpu() ? "" : "pushed: expected ranks that share no GPU");
}

}  // namespace tandem::gpu
