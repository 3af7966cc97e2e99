#include "engine/parallel/collective_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <new>

#include "core/system/files.h"
#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

/// One letter for the kind of outcome, then the text.
std::string run_to_outcome(const std::function<std::string()>& work) {
  try {
    return fmt::format("+{}", work());
  } catch (const ConfigError& error) {
    return std::string("c") + error.what();
  } catch (const IoError& error) {
    return std::string("i") + error.what();
  } catch (const std::bad_alloc&) {
    return "mnot enough memory";
  } catch (const std::exception& error) {
    return std::string("e") + error.what();
  }
}

/// Text of a rank's `outcome`; throws its error, prefixed by `prefix`.
std::string text_or_throw(const std::string& outcome, const std::string& prefix = "") {
  if (outcome[0] == '+') return outcome.substr(1);
  const std::string text = prefix + outcome.substr(1);
  if (outcome[0] == 'c') throw ConfigError(text);
  if (outcome[0] == 'i') throw IoError(text);
  if (outcome[0] == 'm') throw Unsupported(text);
  throw Error(text);
}

/// Seconds without file I/O.
class Stall {
 public:
  double seconds() {
    const uint64_t bytes = file_bytes_moved();
    if (bytes != bytes_) since_ = Clock::now();
    bytes_ = bytes;
    return Seconds(Clock::now() - since_).count();
  }

 private:
  uint64_t bytes_ = 0;
  Clock::time_point since_ = Clock::now();
};

/// Outcomes of all ranks. A rank that is still working reports so every 0.25 s.
std::vector<std::string> outcomes(Communicator& world, std::string_view what, uint64_t bytes,
                                  const std::function<std::string()>& work) {
  const DiskDeadline longer(world);
  std::future<std::string> future;
  std::string local;
  if (world.size() > 1 && work && bytes > kLongWorkBytes) {
    future = std::async(std::launch::async, [&work, threads = kernel_threads()] {
      const KernelThreads of_work(threads);  // as this thread has
      return run_to_outcome(work);
    });
  } else {
    local = work ? run_to_outcome(work) : "+";
  }
  constexpr Seconds kTick(0.25);
  Stall stall;
  while (true) {
    if (local.empty() && future.wait_for(kTick) == std::future_status::ready) local = future.get();
    // An unfinished rank sends its time without progress.
    const std::string report = local.empty() ? fmt::format("?{}", stall.seconds()) : local;
    std::vector<std::string> all;
    for (const auto& blob : world.exchange(std::as_bytes(std::span(report)), what)) {
      all.emplace_back(reinterpret_cast<const char*>(blob.data()), blob.size());
    }
    bool done = true;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank][0] != '?') continue;
      done = false;
      if (std::stod(all[rank].substr(1)) < kDiskDeadlineS) continue;
      throw IoError(fmt::format("{}: rank {} has neither read nor written for {} s", what, rank,
                                kDiskDeadlineS));
    }
    if (done) return all;
  }
}

}  // namespace

std::vector<std::string> on_every_rank(Communicator& world, std::string_view what, uint64_t bytes,
                                       const std::function<std::string()>& work) {
  std::vector<std::string> texts = outcomes(world, what, bytes, work);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    texts[rank] =
        text_or_throw(texts[rank], texts.size() > 1 ? fmt::format("rank {}: ", rank) : "");
  }
  return texts;
}

std::string on_rank_zero(Communicator& world, std::string_view what,
                         const std::function<std::string()>& work, uint64_t bytes) {
  return text_or_throw(outcomes(world, what, bytes, world.rank() == 0 ? work : nullptr)[0]);
}

}  // namespace tandem
