// Picture of a trace for documents: SVG without scripts or embedded fonts.
//
// One row per rank, or per multiprocessor for GPU recordings, on one time axis. In a row, a GEMM
// covers other computation, and either covers a wait: visible waits are exposed. Transfers are
// drawn as strips below.
#pragma once

#include <span>
#include <string>

#include "observe/trace.h"

namespace tandem {

struct PictureOptions {
  std::string title;
  int processors = 16;  ///< shown per rank, evenly spread; the picture states the total
};

std::string timeline_svg(std::span<const RankEvents> ranks, const PictureOptions& options);

}  // namespace tandem
