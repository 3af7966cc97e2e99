#include "tests/engine/report/generated_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "tandem/random.h"

namespace tandem {
namespace {

class Random {
 public:
  Random(uint64_t stream, uint64_t seed) : stream_(stream), seed_(seed) {}

  double uniform() {
    if (left_ == 0) words_ = philox(stream_, seed_, next_++), left_ = 4;
    return (words_[size_t(--left_)] + .5) / 4294967296.0;
  }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  int integer(int end) { return std::min(end - 1, int(uniform() * end)); }
  bool happens(double probability) { return uniform() < probability; }
  /// By Box and Muller.
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * M_PI * uniform());
  }
  double exponential() { return -std::log(uniform()); }

 private:
  uint64_t stream_, seed_, next_ = 0;
  std::array<uint32_t, 4> words_{};
  int left_ = 0;
};

/// Noise that is correlated over time, with a spread of 1.
class Wander {
 public:
  /// `steps`: after which the correlation is 1/e.
  explicit Wander(double steps) : stays_(std::exp(-1 / steps)) {}
  double next(Random& random) {
    value_ = is_new_ ? random.normal()
                     : stays_ * value_ + std::sqrt(1 - stays_ * stays_) * random.normal();
    is_new_ = false;
    return value_;
  }

 private:
  double stays_, value_ = 0;
  bool is_new_ = true;
};

/// Work of a rank in one phase.
struct PhaseNoise {
  double offset = 0;  ///< of this rank, for the whole run
  Wander wander{1};
};

struct RankNoise {
  std::array<PhaseNoise, kPhases> phases;
  int burst_left = 0;  ///< steps
  double burst = 0;    ///< log of the factor meanwhile
  double warm_up = 0, warm_steps = 1;
};

constexpr double kTailRate = .05, kTail = 4;          // of frames; mean, in spreads
constexpr double kBurstRate = 1 / 80., kBurst = .15;  // a step and rank; mean
constexpr double kHostWander = .004, kOffset = .004;
constexpr double kTogether = .03, kDrift = .12;

PhaseTimes usual_times(const RecordScenario& scenario, Random& random) {
  PhaseTimes ms{};
  const double scale = random.uniform(80, 400);
  const double backward = random.uniform(.35, .5) * scale;
  ms[size_t(Phase::forward)] = random.uniform(.2, .3) * scale;
  ms[size_t(Phase::backward)] = backward * (scenario.splits_backward ? .55 : 1);
  ms[size_t(Phase::weight_gradients)] = backward * (scenario.splits_backward ? .45 : 0);
  ms[size_t(Phase::update)] = random.uniform(.1, .15) * scale;
  ms[size_t(Phase::data)] = scenario.awaits_data ? random.uniform(.12, .25) * scale : 0;
  ms[size_t(Phase::checkpoint)] = scenario.checkpoint_every > 0 ? random.uniform(1, 3) * scale : 0;
  return ms;
}

/// Noise of a run; `next` is called for every step, rank and phase in order.
class RunNoise {
 public:
  RunNoise(const RecordScenario& scenario, Random& random)
      : scenario_(scenario),
        random_(random),
        hosts_(size_t((scenario.ranks - 1) / scenario.ranks_per_host + 1), Wander(20)),
        of_hosts_(hosts_.size()),
        ranks_(size_t(scenario.ranks)) {
    for (RankNoise& rank : ranks_) {
      rank.warm_up = random.uniform(0, 1.5), rank.warm_steps = random.uniform(1, 4);
      for (PhaseNoise& phase : rank.phases) {
        phase.offset = kOffset * random.normal();
        phase.wander = Wander(random.uniform(.2, 1));  // correlation of 0 to .37
      }
    }
  }

  void begin_step() {
    together_ = kTogether * random_.normal() + kDrift * drift_.next(random_);
    for (size_t i = 0; i < hosts_.size(); ++i) of_hosts_[i] = hosts_[i].next(random_);
  }

  void begin_rank(int64_t step, int rank) {
    RankNoise& noise = ranks_[size_t(rank)];
    if (noise.burst_left > 0) {
      --noise.burst_left;
    } else if (random_.happens(kBurstRate)) {
      noise.burst_left = 1 + random_.integer(8);
      noise.burst = kBurst * random_.exponential();
    }
    of_rank_ = together_ + kHostWander * of_hosts_[size_t(rank / scenario_.ranks_per_host)] +
               (noise.burst_left > 0 ? noise.burst : 0) +
               noise.warm_up * std::exp(-double(step - 1) / noise.warm_steps);
  }

  /// Factor of the usual time.
  double next(int rank, size_t phase) {
    PhaseNoise& noise = ranks_[size_t(rank)].phases[phase];
    double spreads = noise.wander.next(random_);
    if (random_.happens(kTailRate)) spreads += kTail * random_.exponential();
    return std::exp(of_rank_ + noise.offset + scenario_.spread * spreads);
  }

 private:
  const RecordScenario& scenario_;
  Random& random_;
  Wander drift_{200};
  std::vector<Wander> hosts_;
  std::vector<double> of_hosts_;
  std::vector<RankNoise> ranks_;
  double together_ = 0, of_rank_ = 0;
};

/// Phases that end together on all ranks, and the wait for the last one.
struct Meeting {
  std::array<Phase, 2> work;
  Phase wait;
};
constexpr std::array kMeetings{Meeting{{Phase::data, Phase::forward}, Phase::tp_wait},
                               Meeting{{Phase::backward, Phase::weight_gradients}, Phase::dp_wait},
                               Meeting{{Phase::update, Phase::update}, Phase::step_wait}};

}  // namespace

RecordScenario generate_scenario(uint64_t seed) {
  Random random(93, seed);
  RecordScenario scenario{.seed = seed};
  scenario.ranks = 2 << random.integer(4);
  scenario.stages = scenario.ranks >= 8 && random.happens(.3) ? 2 : 1;
  scenario.ranks_per_host = std::min(scenario.ranks, 4 << random.integer(2));
  scenario.spread = random.uniform(.005, .02);
  scenario.splits_backward = random.happens(.5);
  scenario.awaits_data = random.happens(.3);
  scenario.checkpoint_every = random.happens(.3) ? 3 + random.integer(5) : 0;
  scenario.slow_after = random.integer(301);
  int64_t until = 50;
  if (seed % 4 != 3) {
    constexpr Phase kSlowPhases[] = {Phase::data,     Phase::forward,
                                     Phase::backward, Phase::weight_gradients,
                                     Phase::update,   Phase::checkpoint};
    scenario.slow_rank = random.integer(scenario.ranks);
    scenario.slow_phase = kSlowPhases[random.integer(int(std::size(kSlowPhases)))];
    scenario.excess = seed % 2 == 0 ? .05 : random.uniform(.05, .5);
    scenario.awaits_data |= scenario.slow_phase == Phase::data;
    scenario.splits_backward |= scenario.slow_phase == Phase::weight_gradients;
    if (scenario.slow_phase == Phase::checkpoint) {
      if (scenario.checkpoint_every == 0) scenario.checkpoint_every = 3 + random.integer(5);
      until *= scenario.checkpoint_every;
    }
  }
  scenario.steps = scenario.slow_after + until + (random.happens(.5) ? random.integer(201) : 0);
  return scenario;
}

std::vector<RankHistory> generate_records(const RecordScenario& scenario) {
  Random random(94, scenario.seed);
  const PhaseTimes usual = usual_times(scenario, random);
  RunNoise noise(scenario, random);
  std::vector<RankHistory> ranks(size_t(scenario.ranks));
  for (int rank = 0; rank < scenario.ranks; ++rank) {
    ranks[size_t(rank)].position = {.rank = rank,
                                    .ranks = scenario.ranks,
                                    .dp = rank / scenario.stages,
                                    .pp = rank % scenario.stages,
                                    .host = fmt::format("h{}", rank / scenario.ranks_per_host)};
  }
  std::vector<double> clocks(ranks.size());  // begins of the step
  for (int64_t step = 1; step <= scenario.steps; ++step) {
    const bool saves = scenario.checkpoint_every > 0 && step % scenario.checkpoint_every == 0;
    const std::vector<double> begins = clocks;
    noise.begin_step();
    for (int rank = 0; rank < scenario.ranks; ++rank) {
      RankFrame frame{step, 1, 0, {}};
      noise.begin_rank(step, rank);
      for (size_t phase = 0; phase < kPhases; ++phase) {
        if (!is_work(Phase(phase)) || usual[phase] == 0) continue;
        double ms = usual[phase] * noise.next(rank, phase);
        if (Phase(phase) == Phase::checkpoint && !saves) ms = 0;
        const bool is_slow = rank == scenario.slow_rank && Phase(phase) == scenario.slow_phase;
        frame.phases[phase] =
            ms * (is_slow && step > scenario.slow_after ? 1 + scenario.excess : 1);
      }
      ranks[size_t(rank)].frames.push_back(frame);
    }
    for (const Meeting& meeting : kMeetings) {
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const PhaseTimes& phases = ranks[rank].frames.back().phases;
        clocks[rank] += phases[size_t(meeting.work[0])];
        if (meeting.work[1] != meeting.work[0]) clocks[rank] += phases[size_t(meeting.work[1])];
      }
      const double last = std::ranges::max(clocks);
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        ranks[rank].frames.back().phases[size_t(meeting.wait)] = last - clocks[rank];
        clocks[rank] = last;
      }
    }
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      RankFrame& frame = ranks[rank].frames.back();
      clocks[rank] += frame.phases[size_t(Phase::checkpoint)];
      frame.step_ms = clocks[rank] - begins[rank];
    }
  }
  return ranks;
}

}  // namespace tandem
