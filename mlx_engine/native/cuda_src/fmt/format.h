// MLX's headers include fmt's for one message; its wheel doesn't ship them.
#pragma once

#include <string>

namespace fmt {
template <typename... Args>
std::string format(const Args&...) {
  return {};
}
}  // namespace fmt
