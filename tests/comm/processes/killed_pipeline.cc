// killed_pipeline SCHEDULE PHASE RANK TEXT: one rank of a training run on 2 pipeline x 2
// data-parallel ranks, of which RANK kills itself in a phase of its second step. Each of the others
// prints its error and the seconds from the kill to its end. Run by killed_pipeline_test.sh, as
// processes or under mpirun.
//
// Exit status 64 if the schedule has no such phase on that rank, else that of the error.
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/config/config.h"
#include "engine/data/corpus.h"
#include "engine/data/sampler.h"
#include "engine/parallel/dims.h"
#include "engine/parallel/pipeline.h"
#include "engine/parallel/pipeline_stage.h"
#include "engine/train/model_ranks.h"
#include "schedule/pipeline.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace {

using namespace tandem;
using schedule::PassKind;
using schedule::PipelineAction;

constexpr double kDeadline = 10;
constexpr int kNoSuchPhase = 64, kSteps = 3, kKilledStep = 1;

double now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

[[noreturn]] void kill_this_process() {
  fmt::print("killed at {:.3f}\n", now());
  std::fflush(stdout);
  ::kill(::getpid(), SIGKILL);
  ::pause();
  std::abort();
}

/// Moment of a step: before a pass, or outside the passes.
struct Moment {
  std::optional<PipelineAction> pass{};
  int num_before = 0;  ///< passes of its chunk and kind before it
  bool is_reduction = false, is_update = false, is_sharing = false;
};

bool is_backward(const PipelineAction& action) {
  return action.pass == PassKind::backward || action.pass == PassKind::backward_input;
}

/// nullopt if a rank with these passes has no such phase.
std::optional<Moment> find_moment(const std::vector<PipelineAction>& actions,
                                  const std::string& phase) {
  if (phase == "reduction") return Moment{.is_reduction = true};
  if (phase == "update") return Moment{.is_update = true};
  if (phase == "sharing") return Moment{.is_sharing = true};
  const auto first_backward = std::ranges::find_if(actions, is_backward);
  std::vector<PipelineAction> passes;
  if (phase == "warm-up") {
    passes.assign(actions.begin(), first_backward);
  } else if (phase == "steady") {
    // Forward passes that follow a backward pass.
    std::copy_if(first_backward, actions.end(), std::back_inserter(passes),
                 [](const PipelineAction& a) { return a.pass == PassKind::forward; });
  } else if (phase == "cool-down") {
    std::ranges::copy_if(actions, std::back_inserter(passes), is_backward);
    if (!passes.empty()) passes.erase(passes.begin(), passes.end() - 1);
  } else if (phase == "weight") {
    std::ranges::copy_if(actions, std::back_inserter(passes), [](const PipelineAction& a) {
      return a.pass == PassKind::backward_weight;
    });
  } else {
    throw InvalidArgument(fmt::format("{}: expected a phase", phase));
  }
  if (passes.empty()) return std::nullopt;
  const PipelineAction pass = passes[passes.size() / 2];
  const auto num_before = std::count_if(
      actions.begin(), std::ranges::find(actions, pass),
      [&](const auto& action) { return action.pass == pass.pass && action.chunk == pass.chunk; });
  return Moment{.pass = pass, .num_before = int(num_before)};
}

/// Stage whose process is killed before one of its passes.
class KillingStage final : public PipelineStage {
 public:
  KillingStage(std::unique_ptr<PipelineStage> stage, int chunk, const bool& armed,
               const Moment& moment)
      : stage_(std::move(stage)), armed_(armed), num_before_(moment.num_before) {
    if (moment.pass && moment.pass->chunk == chunk) kind_ = moment.pass->pass;
  }

  Tensor message() const override { return stage_->message(); }
  void add_slot() override { stage_->add_slot(); }
  void set_input(int slot, const Tensor& input) override { stage_->set_input(slot, input); }
  Tensor output(int slot) const override { return stage_->output(slot); }
  void set_residual_gradient(const Tensor& gradient) override {
    stage_->set_residual_gradient(gradient);
  }
  Tensor residual_gradient() override { return stage_->residual_gradient(); }
  void enqueue_forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                       int slot) override {
    count(PassKind::forward);
    stage_->enqueue_forward(tokens, targets, slot);
  }
  void backward(int slot, float scale, const FlatRangeCallback& ready) override {
    count(PassKind::backward);
    stage_->backward(slot, scale, ready);
  }
  void backward_input(int slot, float scale) override {
    count(PassKind::backward_input);
    stage_->backward_input(slot, scale);
  }
  void backward_weight(int slot, const FlatRangeCallback& ready) override {
    count(PassKind::backward_weight);
    stage_->backward_weight(slot, ready);
  }
  double take_loss() override { return stage_->take_loss(); }
  Stage* tied_stage() override { return stage_->tied_stage(); }
  void backward_embedding(int slot, const Tensor& dx, const FlatRangeCallback& ready) override {
    stage_->backward_embedding(slot, dx, ready);
  }

 private:
  void count(PassKind kind) {
    if (armed_ && kind == kind_ && num_before_-- == 0) kill_this_process();
  }

  std::unique_ptr<PipelineStage> stage_;
  const bool& armed_;
  std::optional<PassKind> kind_;  // of the pass, if it is one of this chunk
  int num_before_;
};

TrainConfig make_config(const std::string& schedule, const std::string& text) {
  const int chunks = schedule::min_chunks(schedule::parse_pipeline_kind(schedule));
  const std::vector<std::string> overrides{"model.hidden=32",
                                           "model.layers=4",
                                           "model.heads=2",
                                           "model.kv_heads=2",
                                           "model.head_dim=16",
                                           "model.ffn=64",
                                           "model.max_seq=16",
                                           "train.seq=16",
                                           "train.batch=8",
                                           "train.microbatch=1",
                                           "train.dtype=f32",
                                           "model.tie_word_embeddings=true",
                                           "parallel.pp=2",
                                           "parallel.dp=2",
                                           "parallel.strategy=serial",
                                           "parallel.schedule=" + schedule,
                                           "parallel.virtual_stages=" + std::to_string(chunks),
                                           "data.paths=" + text};
  TrainConfig config = parse_config("", "job", overrides);
  check_config(config);
  return config;
}

/// As StepExecutor, with its phases apart.
void run_steps(Communicator& world, const TrainConfig& config, const Moment& moment,
               int killed_rank) {
  const ParallelGroups groups(world, ParallelDims(config.parallel), false);
  const Corpus corpus(config.data.paths, 0);
  const Sampler sampler(corpus, config.train.seq, 1);
  ModelRanks ranks(groups, config, {});
  bool armed = false;
  std::vector<std::unique_ptr<PipelineStage>> stages;
  for (auto& stage : pipeline_stages(ranks.stages())) {
    const int chunk = int(stages.size());
    stages.push_back(std::make_unique<KillingStage>(std::move(stage), chunk, armed, moment));
  }
  Pipeline pipeline(groups.pp(), pipeline_shape(config.parallel, config.train), std::move(stages),
                    false);
  for (ModelChunk& chunk : ranks.chunks) {
    chunk.stage.initialize(1);
    chunk.optimizer.adopt_weights(chunk.stage.parameter_staging());
  }
  pipeline.share_embedding();
  std::vector<int32_t> tokens(size_t(config.train.seq)), targets(tokens);
  const Pipeline::Batch batch{[&](int microbatch) { sampler.read(microbatch, tokens, targets); },
                              tokens, targets};
  for (int step = 0; step < kSteps; ++step) {
    armed = step == kKilledStep && world.rank() == killed_rank;
    for (ModelChunk& chunk : ranks.chunks) chunk.stage.begin_step(1);
    pipeline.run(batch, 1e-2f, [&](int chunk, FlatRange range, bool is_last) {
      if (!is_last) return;
      if (armed && moment.is_reduction) kill_this_process();
      ranks.chunks[size_t(chunk)].optimizer.ready(range);
    });
    for (ModelChunk& chunk : ranks.chunks) chunk.optimizer.reduce();
    if (armed && moment.is_update) kill_this_process();
    for (ModelChunk& chunk : ranks.chunks) {
      chunk.optimizer.update(AdamStep::make(config.optimizer, step, 1e-3, 1));
      chunk.optimizer.await_all();
    }
    if (armed && moment.is_sharing) kill_this_process();
    pipeline.share_embedding();
    world.barrier("end of the step");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    fmt::print(stderr, "usage: killed_pipeline SCHEDULE PHASE RANK TEXT\n");
    return 2;
  }
  const int killed_rank = std::atoi(argv[3]);
  int rank = -1;
  try {
    const TrainConfig config = make_config(argv[1], argv[4]);
    const int pipeline_rank = ParallelDims(config.parallel).index(kPp, killed_rank);
    const auto moment = find_moment(
        schedule::pipeline_actions(pipeline_shape(config.parallel, config.train), pipeline_rank),
        argv[2]);
    if (!moment) return kNoSuchPhase;
    run_world({.ranks = ParallelDims(config.parallel).ranks(), .deadline_s = kDeadline},
              [&](Communicator& world) {
                rank = world.rank();
                run_steps(world, config, *moment, killed_rank);
              });
  } catch (const Error& error) {
    fmt::print("rank {} ended at {:.3f}: {}\n", rank, now(), error.what());
    return error.exit_code();
  }
  fmt::print("rank {} ran all steps\n", rank);
  return 0;
}
