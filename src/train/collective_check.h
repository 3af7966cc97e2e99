// Work that only rank 0 can do (files of the run), with an outcome that every rank shares.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "tandem/communicator.h"

namespace tandem {

/// Runs `work` on rank 0 and returns its text on every rank. Collective. What it throws is thrown
/// on every rank: an IoError or a ConfigError as itself, anything else as Error.
std::string on_rank_zero(Communicator& world, std::string_view what,
                         const std::function<std::string()>& work);

}  // namespace tandem
