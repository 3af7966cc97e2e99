// One trace of all ranks from their segments (observe/span_stream.h), merged in order of time as it
// is read. Memory: two steps of each rank, and spans of messages and calls of the last two steps.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "observe/recorder.h"
#include "observe/span_stream.h"
#include "observe/trace_text.h"

namespace tandem {

/// Span at one end of an arrow.
struct ArrowEnd {
  SpanEvent event;
  TraceSlice slice;
};

/// Called in order of the slices' begins; for an arrow once both of its slices were passed.
struct MergedSpans {
  std::function<void(const SpanEvent& event, const TraceSlice& slice)> slice;
  std::function<void(const ArrowEnd& from, const ArrowEnd& to)> arrow;
};

struct MergedTrace {
  int ranks = 0;
  int64_t events = 0, dropped = 0;  ///< stored, and not
  int64_t first_step = -1, last_step = -1;
  std::chrono::nanoseconds clock_bound{};  ///< max error of a time against those of rank 0
};

/// Reads the ranks' events of these steps. Throws IoError if there are none, naming the folder, or
/// a damaged file.
MergedTrace merge_spans(const std::string& folder, const StepRange& steps,
                        const MergedSpans& consumer);

/// Chrome's JSON of the merged trace, written to `file` as it is merged; `arrows` and `backward` as
/// in observe/trace.h.
struct MergedFile {
  MergedTrace trace;
  int64_t arrows = 0;
  std::chrono::nanoseconds backward{};
};
MergedFile write_merged_trace(const std::string& folder, const StepRange& steps,
                              const std::string& file);

}  // namespace tandem
