#include "bench/engine/bench_pipeline.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "engine/parallel/pipeline.h"
#include "tandem/communicator.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
using schedule::PassCosts;
using schedule::PipelineShape;

constexpr int64_t kMessageElements = int64_t{16} << 10;
constexpr size_t kMessageBytes = size_t(kMessageElements) * sizeof(float);
/// From the agreement on a step's begin to the begin.
constexpr std::chrono::milliseconds kHeadStart{3};

/// Stage whose passes sleep for their cost. Every message has its microbatch and stage in its first
/// and last element, and each pass checks what it received.
class EmulatedStage final : public PipelineStage {
 public:
  EmulatedStage(int stage, int stages, const PassCosts& costs)
      : stage_(stage),
        stages_(stages),
        costs_(costs),
        last_gradient_(make_message()),
        gradient_(as_tensor(last_gradient_)) {}

  Tensor message() const override { return Tensor(nullptr, DType::f32, {1, kMessageElements}); }
  void add_slot() override { slots_.push_back({{}, make_message(), -1}); }
  void set_input(int slot, const Tensor& input) override { slots_[size_t(slot)].input = input; }
  Tensor output(int slot) const override { return as_tensor(slots_[size_t(slot)].output); }
  void set_residual_gradient(const Tensor& gradient) override { gradient_ = gradient; }
  Tensor residual_gradient() override { return gradient_; }

  void enqueue_forward(std::span<const int32_t> tokens, std::span<const int32_t> targets,
                       int index) override {
    const auto begin = Clock::now();
    Slot& slot = slots_[size_t(index)];
    if (stage_ == 0) {
      slot.microbatch = tokens[0];
    } else {
      slot.microbatch = int(slot.input.as<float>()[0]) / stages_;
      expect(slot.input, slot.microbatch, stage_ - 1);
    }
    if (stage_ + 1 == stages_ && slot.microbatch != targets[0]) {
      throw Error(fmt::format("bench pipeline: the last stage received microbatch {} for {}",
                              slot.microbatch, targets[0]));
    }
    write(as_tensor(slot.output), slot.microbatch);
    sleep(begin, costs_.forward);
  }
  void backward(int slot, float, const FlatRangeCallback&) override {
    pass_back(slot, costs_.of(schedule::PassKind::backward));
  }
  void backward_input(int slot, float) override {
    pass_back(slot, costs_.of(schedule::PassKind::backward_input));
  }
  void backward_weight(int, const FlatRangeCallback&) override {
    sleep(Clock::now(), costs_.backward_weight);
  }
  double take_loss() override { return 0; }

 private:
  using Message = std::unique_ptr<float[]>;
  struct Slot {
    Tensor input;
    Message output;
    int microbatch;
  };

  static Message make_message() { return std::make_unique<float[]>(size_t(kMessageElements)); }
  static Tensor as_tensor(const Message& message) {
    return Tensor(message.get(), DType::f32, {1, kMessageElements});
  }
  static void sleep(Clock::time_point begin, double seconds) {
    std::this_thread::sleep_until(begin + std::chrono::duration_cast<Clock::duration>(
                                              std::chrono::duration<double>(seconds)));
  }
  void write(const Tensor& message, int microbatch) const {
    auto* const values = message.as<float>();
    values[0] = values[kMessageElements - 1] = float(microbatch * stages_ + stage_);
  }
  void expect(const Tensor& message, int microbatch, int from_stage) const {
    const float expected = float(microbatch * stages_ + from_stage);
    const float first = message.as<float>()[0], last = message.as<float>()[kMessageElements - 1];
    if (first == expected && last == expected) return;
    throw Error(fmt::format("bench pipeline: stage {} received {} and {} from stage {}, not {}",
                            stage_, first, last, from_stage, expected));
  }
  void pass_back(int slot, double seconds) {
    const auto begin = Clock::now();
    const int microbatch = slots_[size_t(slot)].microbatch;
    if (stage_ + 1 < stages_) expect(gradient_, microbatch, stage_ + 1);
    write(gradient_, microbatch);
    sleep(begin, seconds);
  }

  const int stage_, stages_;
  const PassCosts costs_;
  const Message last_gradient_;  // of the last stage
  Tensor gradient_;
  std::vector<Slot> slots_;
};

/// Moments of one step, written by the ranks.
struct StepMoments {
  Clock::time_point begin;
  std::vector<Clock::time_point> ends;
};

void run_rank(Communicator& comm, const PipelineShape& shape, const PassCosts& costs,
              std::span<StepMoments> steps) {
  prctl(PR_SET_TIMERSLACK, 1);  // the default makes a sleep up to 50 us too long
  std::vector<std::unique_ptr<PipelineStage>> stages;
  for (int chunk = 0; chunk < shape.chunks; ++chunk) {
    stages.push_back(std::make_unique<EmulatedStage>(schedule::stage_of(shape, comm.rank(), chunk),
                                                     shape.stages(), costs));
  }
  Pipeline pipeline(&comm, shape, std::move(stages), false);
  int32_t microbatch = 0;
  const Pipeline::Batch batch{[&](int number) { microbatch = number; }, std::span(&microbatch, 1),
                              std::span(&microbatch, 1)};
  for (StepMoments& step : steps) {
    comm.barrier("end of a step");
    if (comm.rank() == 0) step.begin = Clock::now() + kHeadStart;
    comm.barrier("begin of a step");
    std::this_thread::sleep_until(step.begin);
    pipeline.run(batch, 1, [](int, FlatRange, bool) {});
    step.ends[size_t(comm.rank())] = Clock::now();
  }
}

/// `receipts`: adds those of rank 0.
PipelineStepTimes time_steps(const PipelineShape& shape, const PassCosts& costs, int repeats,
                             std::vector<Receipt>& receipts) {
  std::vector<StepMoments> steps(size_t(repeats) + 1);
  for (StepMoments& step : steps) step.ends.resize(size_t(shape.ranks));
  WorldOptions world{.ranks = shape.ranks};
  if (costs.transfer > 0) world.link = EmulatedLink{double(kMessageBytes) / costs.transfer, 0};
  run_threads(world, [&](Communicator& comm) {
    clear_receipts();
    run_rank(comm, shape, costs, steps);
    if (comm.rank() > 0) return;
    for (Receipt& each : tandem::receipts()) receipts.push_back(std::move(each));
  });
  std::vector<double> seconds;
  for (const StepMoments& step : std::span(steps).subspan(1)) {
    const Clock::duration taken = std::ranges::max(step.ends) - step.begin;
    seconds.push_back(std::chrono::duration<double>(taken).count());
  }
  return {times_of(seconds),
          1e6 * schedule::simulate(shape, schedule::pipeline_actions(shape), costs).makespan};
}

double share_added(double with, double without) {
  return (with - without) / with;
}

}  // namespace

bool PipelineBenchResult::ok() const {
  return std::abs(bubble() - simulated_bubble()) <= kMaxBubbleDifference;
}

double PipelineBenchResult::exposed() const {
  return share_added(linked->step.min_us, unlinked.step.min_us);
}

double PipelineBenchResult::simulated_exposed() const {
  return share_added(linked->simulated_us, unlinked.simulated_us);
}

double PipelineBenchResult::steady_exposed() const {
  return share_added(twice_linked->step.min_us - linked->step.min_us,
                     twice_unlinked->step.min_us - unlinked.step.min_us);
}

double PipelineBenchResult::simulated_steady_exposed() const {
  return share_added(twice_linked->simulated_us - linked->simulated_us,
                     twice_unlinked->simulated_us - unlinked.simulated_us);
}

PipelineBenchResult run_pipeline_bench(const PipelineBench& request) {
  const PassCosts& costs = request.costs;
  schedule::check_pipeline(request.shape);
  if (!(costs.forward > 0 && costs.backward_input > 0 && costs.backward_weight > 0)) {
    throw InvalidArgument("bench pipeline: a pass takes 0 s: expected longer ones");
  }
  PassCosts without_link = costs;
  without_link.transfer = 0;
  PipelineBenchResult result;
  result.busy_us = 1e6 * (costs.forward + costs.backward_input + costs.backward_weight) *
                   request.shape.microbatches * request.shape.chunks;
  result.unlinked = time_steps(request.shape, without_link, request.repeats, result.receipts);
  if (costs.transfer > 0) {
    PipelineShape twice = request.shape;
    twice.microbatches *= 2;
    result.linked = time_steps(request.shape, costs, request.repeats, result.receipts);
    result.twice_linked = time_steps(twice, costs, request.repeats, result.receipts);
    result.twice_unlinked = time_steps(twice, without_link, request.repeats, result.receipts);
  }
  return result;
}

}  // namespace tandem
