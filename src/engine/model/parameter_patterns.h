// Weight decay and learning rate of parameters chosen by patterns of their names.
#pragma once

#include <span>
#include <string>

#include "engine/model/parameter.h"

namespace tandem {

/// Clears `decay` by optimizer.no_decay and sets `lr_scale` by optimizer.lr_scale, whose strings
/// are "PATTERN=NUMBER". A pattern is matched with the whole name of a tensor; * stands for any
/// text, ? for one character, [ab] for one of these. `list`: all parameters of the model. Throws
/// ConfigError that names the pattern if it matches none, if its number is not from 0 to 1000, or
/// if two learning rates match one parameter.
void apply_patterns(std::span<const std::string> no_decay, std::span<const std::string> lr_scale,
                    std::span<Parameter> list);

/// Name with a * for its last number between dots, or for all of them.
std::string to_pattern(const std::string& name, bool all_numbers);

}  // namespace tandem
