#include "comm/processes/rank.h"

#include <fmt/format.h>

#include <exception>
#include <numeric>

#include "comm/processes/process_communicator.h"
#include "core/system/env.h"
#include "observe/recorder.h"

namespace tandem::processes {
namespace {

void check_options(const WorldOptions& options, int size) {
  if (options.ranks != 1 && options.ranks != size) {
    throw InvalidArgument(fmt::format("ranks {}: the world has {}: expected {} or none given",
                                      options.ranks, size, size));
  }
  if (options.link) {
    throw InvalidArgument(fmt::format("link '{}': expected none: only thread-ranks emulate a link",
                                      options.link->describe()));
  }
}

std::unique_ptr<ProcessCommunicator> communicator_of(Engine& engine, uint64_t run,
                                                     const WorldOptions& options) {
  check_options(options, engine.size());
  std::vector<int> ranks(static_cast<size_t>(engine.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<ProcessCommunicator>(engine, run << kRunShift, engine.rank(),
                                               std::move(ranks),
                                               world_deadline(options.deadline_s));
}

/// Scope of a run that lasts as long as its communicators.
struct OpenRun {
  Engine& engine;
  const uint64_t run;
  explicit OpenRun(Engine& engine_) : engine(engine_), run(engine_.begin_run()) {}
  ~OpenRun() { engine.end_run(engine.run_aborted() || engine.run_timed_out()); }
};

}  // namespace

void run(Engine& engine, const WorldOptions& options,
         const std::function<void(Communicator&)>& body) {
  const uint64_t run = engine.begin_run();
  recorder().set_rank(engine.rank());
  const auto give_up = [&](const std::string& reason, int origin = -1) {
    engine.abort(reason, origin);
    engine.end_run(true);
  };
  try {
    body(*communicator_of(engine, run, options));
  } catch (const Aborted& error) {  // this rank was only the first to notice it
    give_up(error.reason, error.origin);
    throw;
  } catch (const std::exception& error) {
    give_up(error.what());
    throw;
  } catch (...) {
    give_up("unknown exception");
    throw;
  }
  engine.end_run(engine.run_aborted());
}

Communicators new_rank(Engine& engine, const WorldOptions& options) {
  const auto open = std::make_shared<OpenRun>(engine);
  try {
    auto comm = communicator_of(engine, open->run, options);
    recorder().set_rank(engine.rank());
    return {{comm.release(), [open](Communicator* gone) { delete gone; }}};
  } catch (const std::exception& error) {
    engine.abort(error.what());
    throw;
  }
}

std::shared_ptr<Communicator> new_member(std::unique_ptr<Bootstrap> bootstrap,
                                         const WorldOptions& options) {
  auto engine = std::make_shared<Engine>(std::move(bootstrap));
  auto rank = new_rank(*engine, options).front();
  Communicator* const comm = rank.get();
  return {comm, [engine = std::move(engine), rank = std::move(rank)](Communicator*) mutable {
            const bool has_waited = engine->run_timed_out();
            rank.reset();
            if (has_waited) engine->end_run(true);
            engine.reset();
          }};
}

}  // namespace tandem::processes
