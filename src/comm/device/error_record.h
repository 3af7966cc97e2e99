// Host side of a rank's ErrorRecord: reports device-side waits that timed out and ends waits. The
// first cause is retained: an abort does not replace the error of the wait that led to it.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "comm/device/device_signal.h"
#include "tandem/error.h"

namespace tandem::gpu {

int state_of(const ErrorRecord& record);

/// Ends the device's waits, unless one of them has timed out, which ends the others.
void end_waits(ErrorRecord& record);

/// Timeout of a wait of `rank`, with `where` appended; nothing if no wait timed out.
std::optional<Timeout> timeout_in(const ErrorRecord& record, int rank, double deadline_s,
                                  const std::string& where = {});

/// Error of a kernel of `rank` that found a rank in another call, if any.
std::optional<Mismatch> mismatch_in(const ErrorRecord& record, int rank);

/// Ends the device's waits after an abort, but lets them time out on their own for `grace`: the
/// aborting rank may have been missing a rank that this one is about to name. Returns that timeout.
std::optional<Timeout> end_after_abort(ErrorRecord& record, int rank, double deadline_s,
                                       std::chrono::milliseconds grace,
                                       const std::string& where = {});

}  // namespace tandem::gpu
