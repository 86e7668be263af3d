// Libraries that are loaded at run time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ddl {

class SharedLibrary {
  public:
    enum class Scope : uint8_t { local, global };  // global: what it loads itself finds its symbols
    // Loads the first of `names` that can be loaded, and never unloads it. Throws Error(DDL_ERROR_UNSUPPORTED), which
    // names `what` needs it, the names that were tried, and the `remedy`.
    SharedLibrary(const std::vector<std::string>& names, const std::string& what, const std::string& remedy,
                  Scope scope = Scope::local);

    // Throws Error(DDL_ERROR_UNSUPPORTED) if the library has no such function.
    template <typename Function>
    void find(const char* name, Function** function) const {
        *function = reinterpret_cast<Function*>(address_of(name));
    }

    const std::string& name() const { return name_; }

  private:
    void* address_of(const char* name) const;

    std::string name_;
    void* handle_ = nullptr;
};

// The file that an environment variable names; "" if it is not set.
std::string chosen_library(const char* variable);

// The file of a loaded library whose name begins with `prefix` ("libcudart.so"); "" if there is none.
std::string loaded_library(const std::string& prefix);

// A number that grows with each library that the process loads: if it is unchanged, none was loaded.
unsigned long long loaded_count();

}  // namespace ddl
