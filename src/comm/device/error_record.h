// The host's end of a rank's ErrorRecord: its device-side waits that gave up, and those that it
// ends. The first cause stays: what a wait has found is not replaced by an abort that follows from
// it.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "comm/device/device_signal.h"
#include "tandem/error.h"

namespace tandem::gpu {

int state_of(const ErrorRecord& record);

/// Ends the device's waits, unless one of them has given up, which ends the others.
void end_waits(ErrorRecord& record);

/// What a wait of `rank` that gave up says, and `where`; nothing where none did.
std::optional<Timeout> timeout_in(const ErrorRecord& record, int rank, double deadline_s,
                                  const std::string& where = {});

/// Error of a kernel of `rank` that met a rank in another call, if any.
std::optional<Mismatch> mismatch_in(const ErrorRecord& record, int rank);

/// After an abort: ends the device's waits, but gives them `grace` to give up by themselves, as who
/// aborted may have missed a rank that this one is about to name. What they say.
std::optional<Timeout> end_after_abort(ErrorRecord& record, int rank, double deadline_s,
                                       std::chrono::milliseconds grace,
                                       const std::string& where = {});

}  // namespace tandem::gpu
