// Picks the fastest of some named candidates by measuring them, collectively: every rank runs them
// on the real shape, interleaved, the slowest rank's time counts, and all ranks make the same
// choice. The first candidate is serial (on GPUs NCCL's) and wins ties: the choice is never slower.
// Measured times are kept in memory and in `tuner.json` under the cache directory (rank 0 reads and
// writes it; tuner_file.h), and decide again whenever they cover all candidates. Behind that file
// stand times that ship with the library (share/tandem/shipped_tuner.json), of hardware that many
// have. With
// TANDEM_TUNE=0 nothing is measured, and the first candidate stands for those that have no times.
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

/// Collective: the index of the chosen candidate. Throws Mismatch where ranks have other `names`,
/// or differ in TANDEM_TUNE. `key` names the hardware, the operator and the shape. `measure_us`,
/// collective, returns the median of each candidate, the same on every rank; it is called only when
/// not all of their times are known.
size_t choose(Communicator& comm, const std::string& key, std::span<const std::string> names,
              const std::function<std::vector<double>()>& measure_us, Margin margin = kOverSerial);

/// Collective, CPU ranks. `shape` tells apart what may be chosen differently ("m 512 n 64 k 64
/// f32"). `seconds`, collective, runs the operator once by a candidate and returns how long that
/// took this rank; `names` are not empty and the same on all ranks.
size_t tune(Communicator& comm, std::string_view op, std::string_view shape,
            std::span<const std::string> names, const std::function<double(size_t)>& seconds);

/// Drops what is kept in memory, so that the next call reads the file again.
void forget_tuned();

/// Times that ship with the library, by key, as in the tuner's own file; read once. Empty, and said
/// in the log, where they are not installed.
const nlohmann::json& shipped_times();

}  // namespace tandem
