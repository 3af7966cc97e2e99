// Picks the fastest of some named candidates by measuring them, collectively: every rank runs them
// on the real shape, interleaved, the slowest rank's time counts, and all ranks make the same
// choice. The first candidate is serial (on GPUs NCCL's) and wins ties: the choice is never slower.
// Measured times are stored in memory and in `tuner.json` under the cache directory (rank 0 reads
// and writes it; tuner_file.h), by machine and build (machine_key.h), and are reused whenever they
// cover all candidates. Times of common hardware ship with the library
// (share/tandem/shipped_tuner.json); the file's take precedence. With TANDEM_TUNE=0 nothing is
// measured, and the first candidate is used if no times are known.
//
// An entry records the load per core, and the larger round spread of the best candidate and the one
// it is compared with. A candidate whose lead over the first is within that spread is used, but not
// saved: the next start measures again. Entries older than 30 days are measured again, and after an
// hour those of a busy machine, or whose spread exceeds the gain. Neither applies if the choice
// affects the bits of a result: what was measured once stays.
#pragma once

#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/communicator.h"
#include "tune/margin.h"

namespace tandem {

/// Whether all candidates give the same bits.
enum class Bits : bool { same, by_candidate };

/// Chosen candidate; converts to its index.
struct Choice {
  size_t index = 0;
  std::vector<double> us;  ///< times of all candidates; none if they are unknown

  operator size_t() const { return index; }
};

/// Collective: the chosen candidate, which may affect results. Throws Mismatch if
/// ranks have other `names`, or differ in TANDEM_TUNE. `key` names the ranks, the operator and the
/// shape. `measure_us`, collective, returns the median of each candidate, equal on every rank; it
/// is called only if not all of their times are known.
Choice choose(Communicator& comm, const std::string& key, std::span<const std::string> names,
              const std::function<std::vector<double>()>& measure_us, Margin margin = kOverSerial);

/// Collective, CPU ranks. `shape` distinguishes cases that may be chosen differently ("m 512 n 64 k
/// 64 f32"). `seconds`, collective, runs the operator once by a candidate and returns the time on
/// this rank; `names` are not empty and equal on all ranks.
Choice tune(Communicator& comm, std::string_view op, std::string_view shape,
            std::span<const std::string> names, const std::function<double(size_t)>& seconds,
            Bits bits = Bits::same);

/// Drops the entries in memory, so that the next call reads the file again.
void forget_tuned();

/// Times that ship with the library, by key, as in the tuner's own file; read once. Empty, with a
/// log message, if they are not installed.
const nlohmann::json& shipped_times();

}  // namespace tandem
